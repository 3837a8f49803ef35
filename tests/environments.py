"""Environments for other people's packages, which want versions that this one does not have."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


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
