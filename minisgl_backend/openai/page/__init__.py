"""The chat page for a browser: static files that use only the endpoint they came from."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_FILES = "/page"
"""The path prefix of the page's files, which need no API key, like the page itself."""

_FOLDER = Path(__file__).parent / "files"
# The page shows model output, so it loads no script, style or picture but its own.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated each time, and answered with 304 if unchanged
}


class _Files(StaticFiles):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        await super().__call__(scope, receive, with_headers)


def add_page(app: FastAPI) -> None:
    """Serves the page at `/` and its files below PAGE_FILES."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    app.mount(PAGE_FILES, _Files(directory=_FOLDER))
