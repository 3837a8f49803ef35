"""Which folders are adapters that a request may name. Needs no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from minisgl_backend.adapters.config import CONFIG_FILE
from minisgl_backend.config import is_adapter_name
from minisgl_backend.errors import ConfigError, MinisglError

TENSOR_FILE = "adapter_model.safetensors"
TASK_FILE = "task.safetensors"  # in its place, in a folder of what a client of TensorRT-LLM has sent
TASK_PREFIX = "task-"  # of the names of such folders
MAX_LISTED = 4096
MOST_CONFIG_BYTES = 1 << 20


class NoAdapter(MinisglError):
    """There is no such folder below the roots."""


class OutsideRoots(NoAdapter):
    """It is not below them."""


def below(roots: Collection[Path], given: str, files: Sequence[str] = (CONFIG_FILE, TENSOR_FILE)) -> Path:
    """The folder of an adapter that a request or command gives: its path, or relative to a root. Whatever links are on
    the way, it and its `files` are below one of the roots. Raises OutsideRoots, and NoAdapter where there is none, or
    not the first of the files."""
    if not given or len(given) > 4096 or not given.isprintable():
        raise OutsideRoots(f"{given[:200]!r} is not the path of a folder")
    tops = [Path(os.path.realpath(root)) for root in roots]
    outside = True
    for top in tops:
        folder = Path(os.path.realpath(top / given))  # an absolute path stays one
        if top not in folder.parents:
            continue
        outside = False
        if not (folder / files[0]).is_file():
            continue
        if all(top in Path(os.path.realpath(folder / name)).parents for name in files):
            return folder
        outside = True
    if outside:
        raise OutsideRoots(f"{given[:200]!r} is not below a folder of adapters")
    raise NoAdapter(f"{given[:200]!r} has no {files[0]}")


def check_sizes(folder: Path, most_bytes: int) -> None:
    """Raises ConfigError where a file of an adapter is larger than any that is right, before it is read."""
    for name, most in ((CONFIG_FILE, MOST_CONFIG_BYTES), (TENSOR_FILE, most_bytes), (TASK_FILE, most_bytes)):
        try:
            size = (folder / name).stat().st_size
        except OSError:
            continue  # told when it is read
        if size > most:
            shown = "lora_weights" if name == TASK_FILE else folder / name
            raise ConfigError(f"{shown} has {size} bytes; allowed: up to {most}")


def names_below(root: Path) -> Iterator[str]:
    """Of the first folders of adapters there, as requests name them."""
    try:
        entries = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return
    for name in entries[:MAX_LISTED]:
        if is_folder_name(name):
            with contextlib.suppress(NoAdapter):
                below((root,), name)
                yield name


def is_folder_name(name: str) -> bool:
    """Whether a folder of that name can be asked for by it: no path, and nothing hidden."""
    return is_adapter_name(name) and not name.startswith(".") and not {"/", "\\"} & set(name)
