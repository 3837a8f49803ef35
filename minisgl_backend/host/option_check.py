"""Asks beside the server's start what `python -m minisgl_backend check` says, which takes seconds and no model.

A process of its own: importing torch would leave the supervisor with its memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from minisgl_backend.host.repository import ENGINE_MODEL
from minisgl_backend.host.settings import read_parameters

_WRONG_OPTIONS = 2  # exit code; any other one says nothing about the options


class OptionCheck:
    """Starts at construction, for the engine options written in `repository`; nothing is checked without an engine, nor
    of the null runner, which has no device."""

    def __init__(self, repository: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        config = repository / ENGINE_MODEL / "config.pbtxt"
        if config.is_file() and read_parameters(config.read_text(encoding="utf-8")).get("runner") != "null":
            # Where the machine has no process left for it, the server's own start says what is wrong, only later.
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "minisgl_backend", "check", "--quiet", "--repository", str(repository)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for the supervisor
                )

    def refusal(self) -> str | None:
        """Why the options cannot be served; None while nothing is known and where nothing is wrong. Never waits."""
        if self._process is None or self._process.poll() != _WRONG_OPTIONS:
            return None
        assert self._process.stderr is not None
        lines = [line.removeprefix("error: ") for line in self._process.stderr.read().splitlines() if line.strip()]
        self._process.stderr.close()
        self._process = None
        return lines[-1] if lines else None

    def wait(self, seconds: float) -> None:
        """Until the answer is there, but no longer than that."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def end(self) -> None:
        """The answer is of no interest any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._process = None
