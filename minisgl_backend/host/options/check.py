"""Runs `python -m minisgl_backend check` alongside the server's start; it takes seconds and loads no model.

A process of its own: importing torch would leave the supervisor with its memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from minisgl_backend.host.options.engine import read_parameters
from minisgl_backend.host.repository import ENGINE_MODEL

_WRONG_OPTIONS = 2  # exit code; others say nothing about the options


class OptionCheck:
    """Starts at construction, for the engine options in `repository`. Does nothing for a repository without an engine,
    or for the null runner, which has no device."""

    def __init__(self, repository: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        config = repository / ENGINE_MODEL / "config.pbtxt"
        if config.is_file() and read_parameters(config.read_text(encoding="utf-8")).get("runner") != "null":
            # If the machine has no process left for it, the server's own start reports the same, only later.
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
        """Why the options cannot be served; None if that is unknown yet or they can. Never waits."""
        if self._process is None or self._process.poll() != _WRONG_OPTIONS:
            return None
        assert self._process.stderr is not None
        lines = [line.removeprefix("error: ") for line in self._process.stderr.read().splitlines() if line.strip()]
        self._process.stderr.close()
        self._process = None
        return lines[-1] if lines else None

    def wait(self, seconds: float) -> None:
        """Waits for the result, at most `seconds`."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def end(self) -> None:
        """The result is no longer needed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._process = None
