"""The adapters that an engine serves, by name. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class ServedAdapter(NamedTuple):
    """One whose factors every rank has on the host, by its number."""

    name: str
    number: int  # from 0 on
    digest: bytes  # of what it adds: prompts share cached prefixes by it, and not by the name


NO_ADAPTER = ServedAdapter("", -1, b"")
