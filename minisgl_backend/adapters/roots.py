"""Which folders are adapters that a request may name. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from minisgl_backend.adapters.config import CONFIG_FILE
from minisgl_backend.config import is_adapter_name
from minisgl_backend.errors import MinisglError

TENSOR_FILE = "adapter_model.safetensors"
MAX_LISTED = 4096


class NoAdapter(MinisglError):
    """There is no such folder below the roots."""


class OutsideRoots(NoAdapter):
    """It is not below them."""


def below(roots: Collection[Path], given: str) -> Path:
    """The folder of an adapter that a request or command gives: its path, or relative to a root. Whatever links are on
    the way, it and its files are below one of the roots. Raises OutsideRoots, and NoAdapter where there is none."""
    if not given or len(given) > 4096 or not given.isprintable():
        raise OutsideRoots(f"{given[:200]!r} is not the path of a folder")
    tops = [Path(os.path.realpath(root)) for root in roots]
    outside = True
    for top in tops:
        folder = Path(os.path.realpath(top / given))  # an absolute path stays one
        if top not in folder.parents:
            continue
        outside = False
        if not (folder / CONFIG_FILE).is_file():
            continue
        files = [Path(os.path.realpath(folder / name)) for name in (CONFIG_FILE, TENSOR_FILE)]
        if all(top in file.parents for file in files):
            return folder
        outside = True
    if outside:
        raise OutsideRoots(f"{given[:200]!r} is not below a folder of adapters")
    raise NoAdapter(f"{given[:200]!r} has no {CONFIG_FILE}")


def names_below(root: Path) -> Iterator[str]:
    """Of the first folders of adapters there, as requests name them."""
    try:
        entries = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return
    for name in entries[:MAX_LISTED]:
        if is_folder_name(name) and (root / name / CONFIG_FILE).is_file():
            yield name


def is_folder_name(name: str) -> bool:
    """Whether a folder of that name can be asked for by it: no path, and nothing hidden."""
    return is_adapter_name(name) and not name.startswith(".") and not {"/", "\\"} & set(name)
