"""Which files of a model folder hold its weights. Needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.gguf_index import INDEX


def some(names: list[str], limit: int = 5) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def hint_at_prefix(missing: Sequence[str], unused: Collection[str]) -> str:
    """The end of a message about `missing` tensors: the prefix under which the checkpoint's `unused` ones have them,
    as wrappers save them (module., _orig_mod., base_model.model., language_model.) or as they are without the wrapper.
    "" where there is none."""
    counts = Counter(
        (longer.removesuffix(shorter), verb)
        for longers, shorters, verb in ((unused, set(missing), "has"), (missing, set(unused), "lacks"))
        for longer in longers
        for shorter in _tails(longer)
        if shorter in shorters
    )
    if not counts:
        return ""
    (prefix, verb), count = counts.most_common(1)[0]
    if verb == "has":
        return f"; it has {count} of them under {prefix!r}: save it without, or take the model's own files"
    return f"; it has {count} of them without {prefix!r} in front: save it as the whole model, or name its architecture"


def _tails(name: str) -> Iterator[str]:
    """What is behind each of a name's dots."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts) - 1))


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files, or the index of a GGUF file. Raises ConfigError where there are none, or not those that
    the index names."""
    if (folder / INDEX).is_file():
        return [folder / INDEX]
    # The order of transformers: one whole file, else the index's shards. Other files may hold the same weights again.
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if index.is_file() and not whole.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}") from None
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ConfigError(f"{index} names files that do not exist: {some(missing)}")
        paths = [folder / name for name in sorted(names)]
    if not paths:
        raise ConfigError(f"{folder} has no *.safetensors files; other weight formats are not read{_hint(folder)}")
    return paths


def _hint(folder: Path) -> str:
    """What to do with the weights that are there."""
    if any(folder.glob("*.bin")):
        return (
            "; transformers converts *.bin: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(FOLDER)"
        )
    if any(folder.glob("*.gguf")):
        return "; a *.gguf file is served by its own path, not by its folder's"
    return ""
