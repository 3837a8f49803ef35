"""The page to chat in a browser: fixed files, which ask the endpoint they came from and nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_FILES = "/page"
"""Below this path are the files of the page; they are open to all, as the page itself is."""

_FOLDER = Path(__file__).parent / "files"
# What models write is shown on this page: no script, style or picture but the page's own is ever taken.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, and answered 304 where nothing has changed
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
