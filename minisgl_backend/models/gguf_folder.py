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
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.gguf_config import ROPE_FACTORS, architecture_of, config_of, end_tokens_of
from minisgl_backend.process.interpreter import python_executable
from minisgl_backend.weights.gguf_header import GGUFHeader, GGUFTensor
from minisgl_backend.weights.gguf_index import GGUFIndex, IndexedTensor
from minisgl_backend.weights.gguf_names import GGUFArchitecture
from minisgl_backend.weights.shards import some

log = logging.getLogger(__name__)

_KEPT = 32  # cached folders, of a few to 40 MB each; the least recently used are removed
_VERSION = 2  # of the folders' format


def gguf_folder(path: Path) -> Path:
    """The model folder of a GGUF file; of a split one, `path` is any part.

    Raises ConfigError for what cannot be read, naming it and what is served, and where the package gguf is missing.
    """
    path = path.resolve()
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model is {str(path)!r}, whose weights are read by the package gguf, which is not installed; "
            "pip install 'gguf>=0.10' (the extra gguf)"
        )
    header = GGUFHeader.read(path)
    folder = _root() / _key(header.files) / header.files[0].stem
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(header, folder)
            os.utime(folder.parent)
            _remove_old(folder.parent.parent)
    except OSError as error:
        raise ConfigError(
            f"{folder.parent.parent}, where tokenizers of GGUF files are kept, cannot be written: "
            f"{error.strerror or error}; XDG_CACHE_HOME names another folder"
        ) from None
    return folder


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "gguf"


def _key(files: Iterable[Path]) -> str:
    """Cache key, which changes with the files."""
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(repr((_VERSION, facts)).encode()).hexdigest()[:16]


def _make(header: GGUFHeader, folder: Path) -> None:
    kind = architecture_of(header)
    config, index = config_of(header), _index(header, kind)
    log.info("reading the tokenizer of %s, once; it is kept in %s", header.files[0], folder)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent.parent) as temporary:
        work = Path(temporary) / folder.name
        work.mkdir()
        _convert_tokenizer(header.files[0], work)
        index.save(work)
        (work / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        ends = {"eos_token_id": end_tokens_of(header.metadata)}
        (work / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        work.rename(folder)


def _convert_tokenizer(file: Path, folder: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [python_executable(), "-m", "minisgl_backend.models.gguf_tokenizer", str(file), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ConfigError(f"{file}: its tokenizer cannot be read by transformers: {lines[-1]}")


def _index(header: GGUFHeader, kind: GGUFArchitecture) -> GGUFIndex:
    tensors, unread = [], []
    for stored, tensor in header.tensors.items():
        name = kind.name(stored)
        if name is not None:
            tensors.append(_indexed(header, kind, stored, name, tensor))
        elif stored not in ROPE_FACTORS:
            unread.append(stored)
    if unread:
        raise ConfigError(
            f"{header.files[0]} has {len(unread)} tensors that {kind.architecture} does not have: {some(unread)}"
        )
    sizes = tuple(file.stat().st_size for file in header.files)
    return GGUFIndex(header.files, sizes, tuple(tensors))


def _indexed(header: GGUFHeader, kind: GGUFArchitecture, stored: str, name: str, tensor: GGUFTensor) -> IndexedTensor:
    heads, shape = 0, tensor.shape
    if kind.pairs_adjacent and stored.endswith((".attn_q.weight", ".attn_k.weight")):
        count = "head_count" if "attn_q" in stored else "head_count_kv"
        heads = header.metadata[f"{header.metadata['general.architecture']}.attention.{count}"]
        heads = heads[0] if isinstance(heads, list) else heads  # by layer: `config_of` has checked that all are equal
    if name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
    return IndexedTensor(
        name=name,
        file=header.files.index(tensor.file),
        type=tensor.type.name,
        shape=shape,
        offset=tensor.offset,
        heads=heads,
        add=-kind.norm_offset if stored.endswith("norm.weight") else 0.0,
    )


def _remove_old(root: Path) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
