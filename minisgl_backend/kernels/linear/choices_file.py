"""The file that remembers what was measured: JSON, the choice by number of rows of each kind of GEMM.

A kind is a name in which all stands that a choice depends on: the device, versions of libraries, number format, shape.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path

Choices = dict[str, str]  # by number of rows


class ChoicesFile:
    def __init__(self, path: Path | None) -> None:
        """path: None: nothing is remembered."""
        self._path = path

    def read(self, kind: str, allowed: re.Pattern[str]) -> Choices:
        """What is remembered of a kind, and is allowed."""
        return {rows: choice for rows, choice in self._content().get(kind, {}).items() if allowed.fullmatch(choice)}

    def add(self, kind: str, choices: Choices) -> None:
        """Of two processes that write at once one measures again later."""
        if self._path is None or not choices:
            return
        with contextlib.suppress(OSError):  # a disk that cannot be written costs a measurement at the next start
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = self._content()
            content = json.dumps({**known, kind: {**known.get(kind, {}), **choices}}, indent=1)
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(content)
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)
                raise

    def _content(self) -> dict[str, Choices]:
        """All that is text; nothing where the file is missing or broken: it is a cache."""
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_text())
            return {
                kind: {rows: choice for rows, choice in choices.items() if isinstance(choice, str)}
                for kind, choices in content.items()
            }
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}
