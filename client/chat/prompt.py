"""Reads input lines at a terminal: line editing, history, completion of /commands."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PROMPT = "> "
_HISTORY_LINES = 1000


class Prompt:
    """Lines from the standard input. A terminal gets readline, a history file and a prompt; a pipe gets nothing."""

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        self._history = history
        self._readline: Any = None
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                self._readline = importlib.import_module("readline")  # input() uses it from now on
        if self._readline is not None:
            self._set_up(commands)

    def _set_up(self, commands: Sequence[str]) -> None:
        with contextlib.suppress(OSError):
            self._readline.read_history_file(self._history)
        self._readline.set_history_length(_HISTORY_LINES)
        self._readline.set_completer_delims(" \t\n")
        self._readline.set_completer(lambda text, state: _completion(commands, text, state))
        self._readline.parse_and_bind("tab: complete")

    def read(self) -> str | None:
        """The next line that is not empty, None at the end of the input. Raises KeyboardInterrupt."""
        while True:
            try:
                line = input(self._shown_prompt()).strip()
            except EOFError:
                return None
            if line:
                return line

    def _shown_prompt(self) -> str:
        if not sys.stdin.isatty():
            return ""
        if sys.stdout.isatty():
            return _PROMPT
        sys.stderr.write(_PROMPT)  # the output goes into a file
        sys.stderr.flush()
        return ""

    def close(self) -> None:
        """Writes the history, which only its owner may read."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            self._readline.write_history_file(self._history)


def default_history() -> Path:
    """In the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "minisgl" / "chat_history"


def _completion(commands: Sequence[str], text: str, state: int) -> str | None:
    found = [command for command in commands if text.startswith("/") and command.startswith(text)]
    return found[state] if state < len(found) else None
