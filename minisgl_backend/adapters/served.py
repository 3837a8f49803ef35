"""The adapters that an engine serves, by name. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class ServedAdapter(NamedTuple):
    """One that is in a slot of the device."""

    name: str
    slot: int  # from 1 on
    digest: bytes  # of what it adds: prompts share cached prefixes by it, and not by the name
