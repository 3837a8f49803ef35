"""What the engine reads from environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from minisgl_backend.errors import ConfigError

HANG_S = 15.0
ADMIN_KEY = "MINISGL_ADMIN_KEY"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """All of them, read once, at the start."""

    # MINISGL_DISABLE_OVERLAP_SCHEDULING=0/1; None: where steps run while the host goes on, as on a GPU. Elsewhere each
    # token would come a step later for it.
    overlap: bool | None
    log_level: str  # LOG_LEVEL
    flashinfer_tensor_cores: bool | None  # FLASHINFER_USE_TENSOR_CORES=0/1; None: the measured default
    null_runner_log: str = ""  # MINISGL_NULL_RUNNER_LOG: a file that gets the times of the null runner's steps
    # MINISGL_NULL_RUNNER_SCRIPTS: a JSON list of what runner=null says, texts or token ids; for tests
    null_runner_scripts: str = ""
    # MINISGL_EAGER_GRAPHS=1: what is captured on a GPU (padding, static buffers, order of the collectives) without a
    # capture, on any device; for tests
    eager_graphs: bool = False
    # MINISGL_HANG_SECONDS: how long a process of the engine may be silent, and a step may wait for other ranks or for
    # the device, until the engine counts as hanging
    hang_s: float = HANG_S

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Raises ConfigError for a value that is not one of those allowed."""
        level = environ.get("LOG_LEVEL", "INFO").upper()
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ConfigError(f"LOG_LEVEL is {level!r}; allowed: DEBUG, INFO, WARNING, ERROR")
        sequential = _environment_flag(environ, "MINISGL_DISABLE_OVERLAP_SCHEDULING")
        return cls(
            overlap=None if sequential is None else not sequential,
            log_level=level,
            flashinfer_tensor_cores=_environment_flag(environ, "FLASHINFER_USE_TENSOR_CORES"),
            null_runner_log=environ.get("MINISGL_NULL_RUNNER_LOG", ""),
            null_runner_scripts=environ.get("MINISGL_NULL_RUNNER_SCRIPTS", ""),
            eager_graphs=bool(_environment_flag(environ, "MINISGL_EAGER_GRAPHS")),
            hang_s=_environment_seconds(environ, "MINISGL_HANG_SECONDS", HANG_S),
        )


def admin_key(environ: Mapping[str, str] = os.environ) -> str:
    """MINISGL_ADMIN_KEY, which whoever loads adapters must know; "": nobody can. Apart from the others, which other
    processes are told by their command lines."""
    return environ.get(ADMIN_KEY, "")


def _environment_seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds >= 2.0):  # a sign comes every second
        raise ConfigError(f"{name} is {text!r}; allowed: a number of seconds, 2 or more")
    return seconds


def _environment_flag(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is {text!r}; allowed: 0 or 1")
    return None if text == "" else text == "1"
