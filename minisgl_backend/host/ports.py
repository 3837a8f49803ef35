"""Whether TCP ports can be had."""

from __future__ import annotations

import socket
from collections.abc import Sequence


def free_port_error(host: str, ports: Sequence[tuple[str, int]]) -> str | None:
    """What is wrong with these (option, port) pairs on `host`, or None."""
    seen: dict[int, str] = {}
    for option, port in ports:
        if port in seen:
            return f"{option} is {port}, and so is {seen[port]}; each needs a port of its own"
        seen[port] = option
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                reason = error.strerror or str(error)
                return f"{option} is {port}, which cannot be had on {host} ({reason.lower()}); choose another port"
    return None
