"""Environments for other people's packages, which want versions that this one does not have."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

TOOLS = Path(sys.prefix) / "tools"  # what is installed there stays
INSTALL_SECONDS = 1200.0


def output_of(command: Sequence[object], seconds: float, **environment: str) -> str:
    """What a command prints; fails where it does."""
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "NO_PROXY": "*", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def python_with(package: str, *others: str) -> Path:
    """The Python of an environment with these packages alone."""
    python = TOOLS / package / "bin" / "python"
    if not python.exists():
        output_of([sys.executable, "-m", "venv", TOOLS / package], INSTALL_SECONDS)
        output_of([python, "-m", "pip", "install", "-q", package, *others], INSTALL_SECONDS)
    return python


def npm_folder(name: str, *packages: str) -> Path:
    """A folder whose node_modules has these packages."""
    folder = TOOLS / name
    if not (folder / "node_modules").exists():
        output_of(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages], INSTALL_SECONDS)
    return folder


def environment_behind(folder: Path, *packages: str) -> Path:
    """The Python of an environment with these packages, which takes from this one whatever it can. Skips the test
    where pip cannot install them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    if subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=False).returncode:
        pytest.skip(f"pip cannot install {', '.join(packages)} here")
    return python
