"""The project as others get it: built into a source archive and a wheel, and installed without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OWN = ("minisgl", "_minisgl", "__editable__", "__pycache__")


@dataclass(frozen=True)
class Distribution:
    """The two files that are published; the wheel was built from the archive."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Distribution:
    """As `python -m build` does it, with the backend that is installed."""
    _run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    _run(["tar", "-xzf", str(sdist)], folder)
    tree = folder / sdist.name.removesuffix(".tar.gz")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], tree)
    (wheel,) = folder.glob("*.whl")
    return Distribution(sdist, wheel)


@dataclass(frozen=True)
class Installation:
    """An environment into which the wheel alone was installed; its other packages are links to this one's."""

    prefix: Path

    @property
    def site_packages(self) -> Path:
        return self.prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def command(self, name: str) -> str:
        return str(self.prefix / "bin" / name)

    def environment(self) -> dict[str, str]:
        """This process's, without what leads back to the checkout."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own = str(Path(sys.prefix) / "bin")
        path = [folder for folder in kept.get("PATH", os.defpath).split(os.pathsep) if folder != own]
        return {**kept, "PATH": os.pathsep.join([str(self.prefix / "bin"), *path])}

    def run(self, folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One of its commands, in `folder`."""
        return subprocess.run(
            [self.command(name), *arguments],
            cwd=folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def install(wheel: Path, prefix: Path) -> Installation:
    """By pip, without the network: the packages that the wheel needs are there already."""
    shared = "include-system-site-packages = true" in (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    venv.create(prefix, system_site_packages=shared, symlinks=True)
    installation = Installation(prefix)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(_OWN):
            (installation.site_packages / entry.name).symlink_to(entry)
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    _run([installation.command("python"), *pip], prefix)
    return installation


def _run(command: list[str], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
