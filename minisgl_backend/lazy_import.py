"""For tables whose rows name their code, so that a process imports what it uses of them. Standard library only."""

from __future__ import annotations

import importlib
from typing import Any


def load_attribute(reference: str) -> Any:
    """MODULE:NAME, imported now."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
