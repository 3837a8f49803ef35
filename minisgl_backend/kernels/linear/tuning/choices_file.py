"""The file that caches measured choices: JSON, for each kind of GEMM the choice by number of rows.

The name of a kind has everything that a choice depends on: the device, versions of libraries, number format, shape.
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
        """path: None: nothing is cached."""
        self._path = path

    def read(self, kind: str, allowed: re.Pattern[str]) -> Choices:
        """The cached choices of a kind that match `allowed`."""
        return {rows: choice for rows, choice in self._content().get(kind, {}).items() if allowed.fullmatch(choice)}

    def add(self, kind: str, choices: Choices) -> None:
        """Adds choices. If two processes write at once, one of them measures again at its next start."""
        if self._path is None or not choices:
            return
        with contextlib.suppress(OSError):  # without it, the next start measures again
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
        """The file's well-formed content; empty where it is missing or broken, since it is a cache."""
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
