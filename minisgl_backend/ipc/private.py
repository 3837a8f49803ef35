"""Directories that only the user may enter. Standard library only."""

from __future__ import annotations

import contextlib
import getpass
import os
import stat
from pathlib import Path

from minisgl_backend.errors import ConfigError


def make_private(directory: Path) -> None:
    """Creates the directory with mode 0700. Raises ConfigError if somebody else owns it or could enter it."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory that only the user {getpass.getuser()} may enter; "
            "remove it and start again"
        )
