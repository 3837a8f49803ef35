"""Whether TCP ports are free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence


def free_port_error(host: str, ports: Sequence[tuple[str, int]]) -> str | None:
    """What is wrong with these (option, port) pairs on `host`, or None. All occupied ports are named at once."""
    seen: dict[int, str] = {}
    taken: dict[str, list[str]] = {}  # reason -> options with their ports
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
                reason = (error.strerror or str(error)).lower()
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    return f"--host is {host!r} ({reason}); allowed: an address of this machine, 0.0.0.0 for all"
                taken.setdefault(reason, []).append(f"{option} is {port}")
    for reason, named in taken.items():
        these = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
        others = "another port" if len(named) == 1 else "other ports"
        return f"{these}, which cannot be had on {host} ({reason}); choose {others}"
    return None
