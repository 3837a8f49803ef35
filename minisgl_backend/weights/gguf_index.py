"""gguf_index.json: stands in a model folder in place of weights and says where they lie in GGUF files. Needs no torch.

`find_model_dir` makes such a folder of a GGUF file (models.gguf_folder); weights are read from the file itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minisgl_backend.errors import ConfigError

INDEX = "gguf_index.json"
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}")  # as the hub's client keeps OWNER/NAME
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class TiledHeads(NamedTuple):
    """Heads of the gated delta rule whose values take turns over its key heads; in checkpoints those of a key head
    follow one another."""

    first: int  # of the rows, or columns, that are of value heads; they go on to the end
    key_heads: int
    size: int  # rows, or columns, of a head
    columns: bool = False


@dataclass(frozen=True, kw_only=True)
class IndexedTensor:
    """One tensor of a checkpoint, or one of each expert: `name` has {expert} in it then."""

    name: str
    file: int  # of the index's files
    type: str
    shape: tuple[int, ...]  # in the checkpoint; with experts, they come first
    offset: int  # bytes from the file's start
    heads: int = 0  # whose rows are in llama.cpp's order: adjacent pairs; 0: they are in the checkpoint's
    add: float = 0.0  # to its numbers
    tiled: TiledHeads | None = None
    negated_exp: bool = False  # the file has -exp of its numbers


@dataclass(frozen=True)
class GGUFIndex:
    """All tensors of a model."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    tensors: tuple[IndexedTensor, ...]

    def save(self, folder: Path) -> None:
        content = {
            "files": [str(path) for path in self.files],
            "sizes": self.sizes,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
        (folder / INDEX).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> GGUFIndex:
        """Raises ConfigError where a GGUF file is not there any more, or has another size."""
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        files = tuple(map(Path, content["files"]))
        for path, size in zip(files, content["sizes"], strict=True):
            if not path.is_file() or path.stat().st_size != size:
                raise ConfigError(f"{path} is not there any more, or has another size than when it was first read")
        return cls(files, tuple(content["sizes"]), tuple(_indexed(**one) for one in content["tensors"]))


def _indexed(shape: list[int], tiled: list[Any] | None, **more: Any) -> IndexedTensor:
    return IndexedTensor(shape=tuple(shape), tiled=None if tiled is None else TiledHeads(*tiled), **more)


def is_gguf(path: Path) -> bool:
    """Whether it is a file of that format, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file, or the first part, of a folder that holds one model in that format and nothing in another."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    files = sorted(path for path in folder.glob("*.[gG][gG][uU][fF]") if not path.name.startswith("mmproj"))
    return files[0] if len({name_of(path) for path in files}) == 1 else None


def name_of(model: Path) -> str:
    """What a model is called where no name was chosen: its folder's path, the id that it has at the hub, or the name of
    its GGUF file without the number of a part, which the folder that is made of it has, too."""
    if (model / INDEX).is_file():
        return model.name
    if snapshot := _SNAPSHOT.fullmatch(str(model)):
        return snapshot[1].replace("--", "/")
    match = _SPLIT.fullmatch(model.name)
    return match[1] if match else model.stem if is_gguf(model) else str(model)


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a model, by the name of one of them. Raises ConfigError where one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    parts = tuple(path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{path} is one of {count} files, of which {missing[0]}{more} is not there")
    return parts


def gguf_files(folder: Path) -> Sequence[Path]:
    """The GGUF files that a model folder stands for; none where it has weights of its own."""
    return GGUFIndex.load(folder / INDEX).files if (folder / INDEX).is_file() else ()
