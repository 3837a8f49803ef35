"""A GGUF file as a model folder: config and tokenizer are converted once and cached, weights stay in the GGUF file.

Everything that reads model folders then reads it like any other, in each of the server's processes; weights are only
dequantized while they are loaded (weights.gguf_files), so no copy of them takes disk space.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.installation import cache_folder
from minisgl_backend.models.end_tokens import token_ids
from minisgl_backend.models.gguf_config import architecture_of, config_of, generation_config_of, pooling_of
from minisgl_backend.models.gguf_keys import check_keys
from minisgl_backend.models.gguf_tokenizer import GGUFTokenizer
from minisgl_backend.models.json_files import read_json_if_there
from minisgl_backend.weights.gguf_header import GGUFHeader, GGUFTensor
from minisgl_backend.weights.gguf_index import GGUFIndex, IndexedTensor, TiledHeads, name_of, parts_of
from minisgl_backend.weights.gguf_names import GGUFArchitecture
from minisgl_backend.weights.shards import some

log = logging.getLogger(__name__)

_ROTATED = tuple(f".attn_{one}.{kind}" for one in "qk" for kind in ("weight", "bias"))
_KEPT = 32  # cached folders, of a few to 40 MB each; the least recently used are removed
_VERSION = 6  # of the folders' format


def gguf_folder(path: Path) -> Path:
    """The model folder of a GGUF file; of a split one, `path` is any part.

    Raises ConfigError for what cannot be read, naming it and what is served, and where the package gguf is missing.
    """
    path = Path(os.path.abspath(path))  # not what a link leads to: a cache's blob has neither the name nor the number
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model is {str(path)!r}, whose weights are read by the package gguf, which is not installed; "
            "pip install 'gguf>=0.18' (the extra gguf)"
        )
    files = parts_of(path)
    folder = _root() / _key(files) / name_of(files[0])
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(GGUFHeader.read(path), folder)
            os.utime(folder.parent)
            _remove_old(folder.parent.parent)
    except OSError as error:
        raise ConfigError(
            f"{folder.parent.parent}, where tokenizers of GGUF files are kept, cannot be written: "
            f"{error.strerror or error}; XDG_CACHE_HOME names another folder"
        ) from None
    return folder


def _root() -> Path:
    return cache_folder() / "gguf"


def _key(files: Sequence[Path]) -> str:
    """Cache key, which changes with the files."""
    read = [*files, *filter(Path.is_file, [_generation_file(files)])]
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in read]
    return hashlib.sha256(repr((_VERSION, facts)).encode()).hexdigest()[:16]


def _make(header: GGUFHeader, folder: Path) -> None:
    kind = architecture_of(header)
    check_keys(header, header.metadata["general.architecture"])
    tokenizer = GGUFTokenizer(header)
    config = config_of(header, bos=tokenizer.special_id("bos"), eos=tokenizer.special_id("eos"))
    index = _index(header, kind, config)
    files = {
        "config.json": config,
        "generation_config.json": _generation_config(header, tokenizer.ends),
        **_pooling_files(pooling_of(header)),
    }
    log.info("the configuration and the tokenizer of %s are kept in %s", header.files[0], folder)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent.parent) as temporary:
        work = Path(temporary) / folder.name
        work.mkdir()
        write_files(work, files)
        _convert_tokenizer(tokenizer, work)
        index.save(work)
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        work.rename(folder)


def _generation_file(files: Sequence[Path]) -> Path:
    return files[0].with_name("generation_config.json")


def _generation_config(header: GGUFHeader, ends: Sequence[int]) -> dict[str, Any]:
    """What the file recommends, under what a generation_config.json beside it does: that was put there for it. Tokens
    that end a text are those of both."""
    own, beside = generation_config_of(header, ends), read_json_if_there(_generation_file(header.files))
    if beside:
        log.info("%s is read with %s", _generation_file(header.files), header.files[0].name)
    more = token_ids("generation_config.json: eos_token_id", beside.get("eos_token_id"))
    return {**own, **beside, "eos_token_id": list(dict.fromkeys((*ends, *more)))}


def _convert_tokenizer(tokenizer: GGUFTokenizer, folder: Path) -> None:
    write_files(folder, tokenizer.files())


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    """`files`: contents of JSON files, by their paths in `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _pooling_files(kind: str | None) -> dict[str, Any]:
    """What sentence-transformers writes for an embedding model; llama.cpp normalizes embeddings, too."""
    if kind is None:
        return {}
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (name, path) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"pooling_mode": kind},
    }


def _index(header: GGUFHeader, kind: GGUFArchitecture, config: Mapping[str, Any]) -> GGUFIndex:
    tensors, unread = [], []
    for stored, tensor in header.tensors.items():
        name = kind.name(stored)
        if name is not None:
            heads = 0
            if kind.pairs_adjacent and stored.endswith(_ROTATED):
                heads = config["num_attention_heads" if ".attn_q." in stored else "num_key_value_heads"]
            indexed = _indexed(header, kind, stored, name, tensor, heads)
            tensors.append(replace(indexed, tiled=_tiled(stored, config)) if kind.tiled else indexed)
        elif not kind.is_without_numbers(stored):
            unread.append(stored)
    if unread:
        raise ConfigError(
            f"{header.files[0]} has {len(unread)} tensors that {kind.architecture} does not have: {some(unread)}"
        )
    sizes = tuple(file.stat().st_size for file in header.files)
    return GGUFIndex(header.files, sizes, tuple(tensors))


def _indexed(
    header: GGUFHeader, kind: GGUFArchitecture, stored: str, name: str, tensor: GGUFTensor, heads: int
) -> IndexedTensor:
    return IndexedTensor(
        name=name,
        file=header.files.index(tensor.file),
        type=tensor.type.name,
        shape=kind.shape(stored, tensor.shape),
        offset=tensor.offset,
        heads=heads,
        add=-kind.norm_offset if stored.endswith("norm.weight") and not stored.endswith(".ssm_norm.weight") else 0.0,
        negated_exp=stored.endswith(".ssm_a"),
    )


def _tiled(stored: str, config: Mapping[str, Any]) -> TiledHeads | None:
    """Whose value heads a tensor has, in the order of llama.cpp's converter."""
    key_heads, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    keys = 2 * key_heads * config["linear_key_head_dim"]
    if key_heads == config["linear_num_value_heads"]:
        return None
    name = stored.split(".")[-2] if stored.endswith((".weight", ".bias")) else stored.split(".")[-1]
    if name == "ssm_out":
        return TiledHeads(0, key_heads, size, columns=True)
    if name in ("attn_qkv", "ssm_conv1d"):
        return TiledHeads(keys, key_heads, size)
    if name == "attn_gate":
        return TiledHeads(0, key_heads, size)
    return TiledHeads(0, key_heads, 1) if name in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta") else None


def _remove_old(root: Path) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
