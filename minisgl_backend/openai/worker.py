"""One process of the endpoint: `... worker FD`, on an inherited listening socket."""

from __future__ import annotations

import gc
import os
import socket
import sys

import uvicorn

from minisgl_backend.environment import Environment
from minisgl_backend.host.openai_endpoint import SETTINGS_VARIABLE
from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.app import create_app
from minisgl_backend.process.resources import give_back_memory, raise_file_limit
from minisgl_backend.process.spawn import TIED, begin_child

_KEEP_ALIVE_SECONDS = 75  # longer than proxies use, so that these never send to a connection that is just closing
_MAX_HEADER_BYTES = 64 << 10


def main() -> None:
    """Serves until SIGTERM; then finishes the requests in flight."""
    begin_child("openai", Environment.read().log_level, tied=TIED in sys.argv)
    raise_file_limit()
    settings = EndpointSettings.from_json(os.environ.pop(SETTINGS_VARIABLE))
    app = create_app(settings)
    gc.collect()
    give_back_memory()
    gc.freeze()  # what has been loaded is permanent and need not be scanned again
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="error",  # each offer of HTTP/2 would be a warning; malformed requests are answered, not logged
        server_header=False,
        # httptools, slightly faster, drops the body of a request that offers HTTP/2 (all of Java's clients do) and
        # reads headers of any length.
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
