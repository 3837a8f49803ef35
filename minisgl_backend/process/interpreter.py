"""The Python interpreter for this process's children."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def python_executable() -> str:
    """The interpreter of this environment, even where `sys.executable` is an embedding program or empty."""
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    candidate = Path(sys.prefix) / "bin" / "python3"
    return str(candidate) if candidate.exists() else (shutil.which("python3") or "python3")
