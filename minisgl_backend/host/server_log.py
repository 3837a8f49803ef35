"""Filters tritonserver's log down to the lines worth reading.

Output of the models passes unchanged, progress bars included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFIX = re.compile(rb"[IWEF]\d{4} ")
_LINE = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ (?P<file>[\w.]+):\d+\] ?(?P<message>.*)", re.DOTALL)
_LIVE_MODELS = re.compile(r"Timeout \d+: Found (\d+) live models and 0 in-flight")

# Logged on every machine without a GPU, at every start or end: no reader can act on it.
_NOISE = (
    "CUDA driver version is insufficient",
    "CudaDriverHelper",
    "DCGM unable to start",
    "fails to convert to integral number",  # the demo model's folder next to the version folders
    "failed to allocate pinned system memory",
    "Failed to initialize NVML",
    "HandleCancellation called even when the context was not cancelled",  # at the end of any stream that failed
    "Non-graceful termination detected",
    "Signal (15) received",
    "Unable to allocate pinned system memory",
    "unable to create stream",
)
# A model's reason for not loading; repeated by each message that passes it on, with the line that raised it.
_REFUSAL = re.compile(r"TritonModelException: (?P<message>.+?)(?=\n\s*\nAt:\n|;?\Z)", re.DOTALL)
_LOAD_FAILED = "failed to load all models"
_WAITS = "Waiting for in-flight requests"


@dataclass
class LogFilter:
    """Filters a byte stream. `live_models`: what the server last reported while shutting down."""

    verbose: bool = False
    quiet: bool = False  # warnings and errors alone
    live_models: int | None = None  # models not unloaded yet, once no request is in flight
    refusal: str | None = None  # why a model could not be loaded, in its own words
    _rest: bytes = b""
    _inside: bool = False  # the first part of the current line has been shown

    def feed(self, data: bytes) -> bytes:
        """The part of the log so far that can be shown now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        shown = []
        for line in lines:
            shown.append(line + b"\n" if self._inside else self._line(line))
            self._inside = False
        # A progress bar has no line end yet. Only the server's own lines are worth waiting for.
        if self._rest and (self._inside or not _could_be_server_line(self._rest)):
            shown.append(self._rest)
            self._rest, self._inside = b"", True
        return b"".join(shown)

    def close(self) -> bytes:
        """The rest, when the stream has ended."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        if live := _LIVE_MODELS.search(text):
            self.live_models = int(live[1])
        match = _LINE.match(text)
        refusal = _REFUSAL.search(_unquote(match["message"])) if match and match["level"] == "E" else None
        self.refusal = refusal["message"] if refusal else self.refusal
        if self.verbose:
            return line + b"\n"
        # The caller reports the reason once, without its consequences.
        if refusal or (self.refusal is not None and _LOAD_FAILED in text):
            return b""
        readable = readable_line(text, quiet=self.quiet)
        return b"" if readable is None else readable.encode() + b"\n"


def readable_line(text: str, *, quiet: bool = False) -> str | None:
    """One line of the log, shortened, or None if it is not worth reading: what is loaded are this project's own models,
    of which the engine tells by itself."""
    if any(noise in text for noise in _NOISE):
        return None
    match = _LINE.match(text)
    if match is None:
        # The server's tables (models, backends, its options) and the empty lines around them.
        return None if text.startswith(("+-", "| ")) or not text.strip() else text
    message = _unquote(match["message"])
    if match["level"] in "WEF":
        return {"W": "warning: ", "E": "error: ", "F": "fatal: "}[match["level"]] + message
    return f"triton: {message}" if message.startswith(_WAITS) and not quiet else None


def _could_be_server_line(rest: bytes) -> bool:
    if len(rest) < 6:
        return re.fullmatch(rb"[IWEF]\d{0,4}|\+-*|\| ?[A-Za-z]*", rest) is not None
    return _PREFIX.match(rest) is not None or rest.startswith((b"+-", b"| "))


def _unquote(message: str) -> str:
    message = message.strip()
    if len(message) >= 2 and message[0] == message[-1] == '"':
        message = message[1:-1].replace("\\n", "\n").replace('\\"', '"')
    return message
