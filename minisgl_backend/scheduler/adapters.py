"""The adapters that requests may name."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.errors import InvalidRequestError

NO_ADAPTER = ServedAdapter("", 0, b"")


class AdapterBook:
    """By name."""

    def __init__(self, served: Sequence[ServedAdapter]) -> None:
        self._by_name = {one.name: one for one in served}

    def find(self, name: str | None) -> ServedAdapter:
        """None: no adapter. Raises InvalidRequestError."""
        if name is None:
            return NO_ADAPTER
        if (found := self._by_name.get(name)) is None:
            names = ", ".join(self._by_name) or "none, as adapters are off"
            raise InvalidRequestError(f"lora_name is {name[:200]!r}, which is not served; allowed: {names}")
        return found
