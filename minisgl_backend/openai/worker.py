"""One process of the endpoint: `... worker FD`, on a listening socket that it inherits."""

from __future__ import annotations

import gc
import os
import socket
import sys

import uvicorn

from minisgl_backend.environment import Environment
from minisgl_backend.host.openai_endpoint import SETTINGS_VARIABLE, EndpointSettings
from minisgl_backend.openai.app import create_app
from minisgl_backend.process.resources import raise_file_limit
from minisgl_backend.process.spawn import TIED, begin_child

_KEEP_ALIVE_SECONDS = 75  # longer than proxies keep theirs, so that they do not meet a connection that just ends
_MAX_HEADER_BYTES = 64 << 10


def main() -> None:
    """Serves until SIGTERM; then finishes the requests in flight."""
    begin_child("openai", Environment.read().log_level, tied=TIED in sys.argv)
    raise_file_limit()
    settings = EndpointSettings.from_json(os.environ.pop(SETTINGS_VARIABLE))
    app = create_app(settings)
    gc.collect()
    gc.freeze()  # what has been loaded lives for ever and need not be looked at again
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="error",  # each offer of HTTP/2 would be a warning; of what is no HTTP the client hears
        server_header=False,
        # httptools, a little quicker, drops the body of a request that offers HTTP/2 (Java's clients all do) and reads
        # heads of any length.
        http="h11",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
    )
    listener = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
