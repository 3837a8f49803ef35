"""Where the files are that come with the package, and those that it keeps: standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def model_repository() -> Path:
    """The model repository that comes with the package: inside it where a wheel is installed, beside it in a checkout.

    The folder need not exist, where somebody copied the package alone.
    """
    package = Path(__file__).resolve().parent
    inside = package / "model_repository"
    return inside if inside.is_dir() else package.parent / "model_repository"


def cache_folder() -> Path:
    """Where files are kept that can be made or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl"
