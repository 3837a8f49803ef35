"""Hides installed packages that a process does not use from its imports: torch takes 2 s and 200 MB."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextlib.contextmanager
def absent(names: Sequence[str]) -> Iterator[None]:
    """Inside, importing these fails in all threads as if they were not installed; none may be imported already."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def absent_torch() -> Iterator[None]:
    """Around the import of transformers, which then stays limited to tokenizers and does not warn about it; torch can
    be imported afterwards. Does nothing if torch is imported already."""
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
