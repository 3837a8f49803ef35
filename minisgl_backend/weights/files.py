"""The weight files of a model folder: safetensors, or those of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from minisgl_backend.errors import ConfigError
from minisgl_backend.process.memory import in_words
from minisgl_backend.weights.gguf_index import INDEX
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.shards import shard_paths


class Readable(Protocol):
    """What is asked of a checkpoint to fill weights: see `Checkpoint`."""

    def names(self) -> set[str]: ...

    def path(self, name: str) -> Path: ...

    def slices(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Any]]: ...


class Checkpoint:
    """Where each tensor of a folder is, by its name with this project's prefix. Reads the headers of the files.

    Raises ConfigError where files are missing or cut off, or have a tensor twice.
    """

    def __init__(self, folder: Path, names: TensorNames | None = None) -> None:
        self.folder = folder
        names = names or TensorNames()
        self._tensors: dict[str, tuple[Path, str]] = {}  # file and the name in it
        for path in shard_paths(folder):
            with open_shard(path) as shard:
                for stored in shard.keys():  # noqa: SIM118  (the handle is no dict)
                    name = names.here(stored)
                    if name in self._tensors:
                        first = self._tensors[name][0].name
                        raise ConfigError(f"{name} is in two files of {folder}: {first} and {path.name}")
                    self._tensors[name] = path, stored

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def path(self, name: str) -> Path:
        return self._tensors[name][0]

    def tensor(self, name: str) -> torch.Tensor:
        """One whole tensor, on the CPU."""
        path, stored = self._tensors[name]
        with open_shard(path) as shard:
            tensor: torch.Tensor = shard.get_tensor(stored)
            return tensor

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """One tensor as a safetensors slice on the CPU, from which parts are read by index."""
        path, stored = self._tensors[name]
        with open_shard(path) as shard:
            yield shard.get_slice(stored)

    def slices(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Any]]:
        """These tensors as slices, file by file in their order there; what is read of them is on the device."""
        by_path: dict[Path, dict[str, str]] = {}
        for name in names:
            path, stored = self._tensors[name]
            by_path.setdefault(path, {})[stored] = name
        for path in sorted(by_path):
            with open_shard(path, device) as shard:
                for stored in shard.keys():  # noqa: SIM118  (the handle is no dict)
                    if stored in by_path[path]:
                        yield by_path[path][stored], shard.get_slice(stored)


def _mapped(path: Path, device: torch.device | None) -> Any:
    try:
        return safe_open(str(path), framework="pt", device=str(device or "cpu"))
    except (RuntimeError, MemoryError) as error:  # torch's own, which name no file
        size, limits = in_words(path.stat().st_size), "ulimit -v and vm.overcommit_memory"
        raise ConfigError(
            f"{path} has {size}, which cannot be mapped into memory ({error}); allowed: a file that fits, or more "
            f"addresses ({limits})"
        ) from None


@contextmanager
def open_shard(path: Path, device: torch.device | None = None) -> Iterator[Any]:
    """A safetensors file; `device`: where its tensors are read to, the CPU unless said. Or the index of a GGUF file,
    whose tensors are read to the CPU."""
    if path.name == INDEX:
        # Imported late: it needs the package gguf.
        from minisgl_backend.weights.gguf_files import GGUFShard

        yield GGUFShard(path)
        return
    try:
        with _mapped(path, device) as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
