"""--ignore-unknown-fields: requests are read as if fields that this server does not know were not there."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl_backend.openai.requests.base import IGNORE

log = logging.getLogger(__name__)

_MOST_NAMES = 256  # that are told; a client can make up any number


class IgnoreUnknownFields:
    """Lets requests have unknown fields; the log names each once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._told: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = IGNORE.set(self._tell)
        try:
            await self._app(scope, receive, send)
        finally:
            IGNORE.reset(token)

    def _tell(self, name: str) -> None:
        if name not in self._told and len(self._told) < _MOST_NAMES:
            self._told.add(name)
            log.warning("field %.60r is unknown and ignored in all requests (--ignore-unknown-fields)", name)
