"""Imports without packages that are installed and that a process has no use for: torch takes 2 s and 200 MB."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextlib.contextmanager
def absent(names: Sequence[str]) -> Iterator[None]:
    """An import of these fails meanwhile, in all threads, as where they are not installed; none may be imported."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def absent_torch() -> Iterator[None]:
    """Around the import of transformers, which then has tokenizers alone, for good, and does not warn of it; torch can
    be imported behind it. Nothing happens where torch is imported already."""
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        with absent(["torch"] if "torch" not in sys.modules else []):
            yield
    finally:
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before
