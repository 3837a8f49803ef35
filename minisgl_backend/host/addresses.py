"""What an address to listen on means: whose it is, and how others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

ALL = ("0.0.0.0", "::", "")


def is_loopback(host: str) -> bool:
    """Whether a name or address (without port or brackets) is this machine's own, whatever a resolver says."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def reached_at(host: str) -> list[str]:
    """Where others reach a server that listens on `host`; if that is all addresses, those that packets leave by."""
    if host not in ALL:
        return [host]
    found = []
    # Connecting a UDP socket sends nothing, and binds it to the address of the route (to an address for documentation).
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            found.append(probe.getsockname()[0])
    return [host or "0.0.0.0", *found]
