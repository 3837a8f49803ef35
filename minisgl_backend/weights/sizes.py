"""How large the weights of a model folder are, by the headers of its files. Needs no torch.

The format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.process.memory import in_words
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.gguf_header import TYPES_BY_NAME
from minisgl_backend.weights.gguf_index import INDEX, GGUFIndex
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.shards import shard_paths

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_OUTPUT = "lm_head.weight"
_FOUR_BITS = (".qweight", ".weight_packed")  # of layers whose format is int4, experts aside


def weight_bytes(
    folder: Path,
    names: TensorNames,
    item_bytes: int | None = None,
    *,
    tied: bool = False,
    quantization: QuantizationConfig | None = None,
) -> int:
    """Memory that the weights take which `names` names, without those that it leaves out.

    `item_bytes`: of one number once it is loaded; None: as in the files. `tied`: an output matrix is not loaded.
    `quantization`: the number formats of its weights; None: plain.
    Raises ConfigError for files that are missing, cannot be read or are cut off.
    """
    formats, total = quantization or QuantizationConfig(), 0
    kept = formats.stored_types
    for path in shard_paths(folder):
        for name, tensor in _header(path).items():
            here = names.here(name)
            is_ours = here.startswith(names.within) and not here.startswith(names.left_out)
            if name == "__metadata__" or not is_ours or (tied and here == _OUTPUT):
                continue
            stored = tensor["data_offsets"][1] - tensor["data_offsets"][0]
            if tensor["dtype"] in kept:
                total += int(kept[tensor["dtype"]] * stored)
                continue
            plain = item_bytes if tensor["dtype"] in _FLOATS or path.name == INDEX else None
            total += formats.bytes_of(here, tuple(tensor["shape"]), stored, plain)
    return total


def repacked_bytes(folder: Path, names: TensorNames, quantization: QuantizationConfig) -> int:
    """What the weights with 4 bits take once more, in the layout of a library, about; experts have none."""
    total = 0
    for path in shard_paths(folder):
        for name, tensor in _header(path).items():
            here = names.here(name)
            module = here.rpartition(".")[0]
            is_ours = here.startswith(names.within) and not here.startswith(names.left_out)
            if not is_ours or not here.endswith(_FOUR_BITS) or ".experts." in here:
                continue
            scheme = quantization.scheme_of(module)
            if scheme is not None and scheme.format == "int4":
                total += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return total


def check_memory(model: str, needed: int, free: int, where: str = "memory") -> None:
    """Raises ConfigError where weights of `needed` bytes do not fit into `free`."""
    if needed > free:
        raise ConfigError(
            f"model is {model!r}, whose weights need {in_words(needed)} of {where}; {in_words(free)} are free; "
            "allowed: a model that fits, or more memory"
        )


def _header(path: Path) -> dict[str, Any]:
    if path.name == INDEX:
        return {
            one.name: {
                "dtype": one.type,
                "shape": one.shape,
                "data_offsets": (0, TYPES_BY_NAME[one.type].bytes_of(one.shape)),
            }
            for one in GGUFIndex.load(path).tensors
        }
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(file.read(length))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        size = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if size < 8 + length + end:
        raise ConfigError(
            f"{path} cannot be read: it has {size} bytes of {8 + length + end}, so that its end is missing"
        )
    return header
