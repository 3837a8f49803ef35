"""--ignore-unknown-fields: requests are read as if fields that this server does not know were absent."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl_backend.openai.log_once import LogOnce
from minisgl_backend.openai.requests.base import IGNORE

log = logging.getLogger(__name__)


class IgnoreUnknownFields:
    """Lets requests have unknown fields; each is logged once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged = LogOnce()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = IGNORE.set(self._tell)
        try:
            await self._app(scope, receive, send)
        finally:
            IGNORE.reset(token)

    def _tell(self, name: str) -> None:
        if self._logged.is_new(name):
            log.warning("field %.60r is unknown and ignored in all requests (--ignore-unknown-fields)", name)
