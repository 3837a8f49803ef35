"""From a model folder to a model on its device: finds the folder, builds the modules, streams the weights in.

Weights go shard by shard, tensor by tensor from the file to their place on the device; a tensor-parallel rank reads
only its own slices.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.select import select_ops
from minisgl_backend.kv.layout import KVScales, MHALayout
from minisgl_backend.layers.config import AttentionConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer, WeightPart
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.process.progress import Progress
from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

# As compressed-tensors and ModelOpt write them.
_KV_SCALE = re.compile(r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(?P<kind>[kv])_scale")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_AT_ONCE = 8192  # of both, while they are compared


def build_model(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    tp: TensorParallel | None = None,
    ops: Ops | None = None,
    dummy_weights: bool = False,
    on_progress: Progress | None = None,
) -> CausalLM:
    """The model of one rank, ready to run. `dummy_weights` reads no files but config.json's.

    `max_seq_len` bounds the positions that the model can be asked for. Raises ConfigError naming tensors that are
    missing, unexpected, in two files or of another shape than config.json says.
    """
    tp = tp or TensorParallel.single()
    config.check_tensor_parallel(tp.size)
    ops = ops or select_ops(device, config.hidden_size, dtype, is_mixture=config.mixture is not None)
    placement = LayerContext(device=device, dtype=dtype, ops=ops, tp=tp)
    if config.tie_word_embeddings and not dummy_weights and not _is_tied(Path(model_dir)):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    model = CausalLM(config, placement, max_seq_len).eval()
    if dummy_weights:
        _fill_with_noise(model)
    else:
        _load_weights(model, Path(model_dir), device, on_progress or (lambda done, total: None))
    model.derive_weights()
    return model


def attention_spec(
    config: ModelConfig,
    *,
    tp_size: int,
    page_size: int,
    max_seq_len: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    flashinfer_tensor_cores: bool | None = None,
) -> AttentionSpec:
    """What attention backends and the KV pool of one rank must serve for this model.

    `kv_dtype`: of keys and values in the cache; None: `dtype`.
    """
    kv = MHALayout(
        num_kv_heads=max(1, config.num_kv_heads // tp_size), head_dim=config.head_dim, dtype=kv_dtype or dtype
    )
    kinds = [_kind(layer.attention, max_seq_len) for layer in config.layers]
    groups = tuple(
        LayerGroup(
            layers=tuple(index for index, other in enumerate(kinds) if other == kind),
            num_q_heads=kind.num_q_heads // tp_size,
            kv=kv,
            window=kind.window,
            scale=kind.scale,
        )
        for kind in dict.fromkeys(kinds)
    )
    return AttentionSpec(
        groups=groups,
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_rows=max_rows,
        dtype=dtype,
        device=device,
        flashinfer_tensor_cores=flashinfer_tensor_cores,
    )


def _kind(attention: AttentionConfig, max_seq_len: int) -> AttentionConfig:
    """What layers of one group have in common. A window that no sequence outgrows is none: its layers join those that
    see everything."""
    window = attention.window
    return AttentionConfig(
        num_q_heads=attention.num_q_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rope=None,
        window=window if window is not None and window < max_seq_len else None,
        scale=attention.scale,
    )


def read_kv_scales(config: ModelConfig, model_dir: str | Path) -> list[KVScales]:
    """The scales of an FP8 KV cache, by layer: those of the checkpoint, and 1 where it has none.

    Raises ConfigError for a scale that is not a finite number above 0.
    """
    scales = [{"k": 1.0, "v": 1.0} for _ in range(config.num_layers)]
    found = 0
    for name, path in _shard_files(Path(model_dir)).items():
        match = _KV_SCALE.fullmatch(name)
        if match is None or int(match["layer"]) >= config.num_layers:
            continue
        with _open(path, torch.device("cpu")) as shard:
            tensor = shard.get_tensor(name).float()
        value = tensor.item() if tensor.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"{path}: {name} is {tensor.tolist()}; allowed: one finite number above 0")
        scales[int(match["layer"])][match["kind"]] = value
        found += 1
    log.info("FP8 KV cache: %d scales of the checkpoint, 1 for the others", found)
    return [KVScales(**values) for values in scales]


def weight_parts(model: CausalLM) -> dict[str, WeightPart]:
    """Every tensor that the model needs, by its name in the checkpoint."""
    parts = {}
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            parent = path.rpartition(".")[0]
            for part in module.weight_parts():
                parts[f"{parent}.{part.name}" if parent else part.name] = part
    return parts


def _load_weights(model: CausalLM, folder: Path, device: torch.device, on_progress: Progress) -> None:
    parts = weight_parts(model)
    files = _shard_files(folder)
    _check_names(model.config, parts, files)
    total = sum(part.target.numel() * part.target.element_size() for part in parts.values())
    done = 0
    for path in sorted(set(files.values())):
        with _open(path, device) as shard:
            for name in shard.keys():  # noqa: SIM118  (the handle is no dict)
                part = parts.get(name)
                if part is None:
                    continue
                _copy(name, part, shard.get_slice(name), path)
                done += part.target.numel() * part.target.element_size()
                on_progress(done, total)


def _is_tied(folder: Path) -> bool:
    """False where the checkpoint has an output projection other than its embedding: it counts then, as in
    transformers 5, whatever config.json says."""
    files = _shard_files(folder)
    if _EMBEDDING not in files or _OUTPUT not in files:
        return True
    cpu = torch.device("cpu")
    with _open(files[_EMBEDDING], cpu) as first, _open(files[_OUTPUT], cpu) as second:
        embedding, output = first.get_slice(_EMBEDDING), second.get_slice(_OUTPUT)
        num_rows = embedding.get_shape()[0]
        if output.get_shape() == embedding.get_shape() and all(
            torch.equal(embedding[start : start + _ROWS_AT_ONCE], output[start : start + _ROWS_AT_ONCE])
            for start in range(0, num_rows, _ROWS_AT_ONCE)
        ):
            return True
    log.warning(
        "%s: config.json says tie_word_embeddings, but the checkpoint's %s differs from %s; it is used, as by "
        "transformers 5. Set tie_word_embeddings to false, or remove that tensor.",
        folder,
        _OUTPUT,
        _EMBEDDING,
    )
    return False


def check_weight_files(folder: Path) -> None:
    """Reads the headers of a model folder's weights. Raises ConfigError where files are missing, cut off or doubled."""
    _shard_files(folder)


def _copy(name: str, part: WeightPart, source: Any, path: Path) -> None:
    shape = tuple(source.get_shape())
    if shape != part.shape:
        raise ConfigError(f"{path}: {name} has shape {shape}; config.json makes it {part.shape}")
    end = part.start + part.target.shape[part.dim]
    index = (slice(None),) * part.dim + (slice(part.start, end),)
    # The slice is read from the file in the file's format; copy_ converts it.
    values = source[index]
    if not values.is_floating_point():
        format_name = str(values.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{path}: {name} has the number format {format_name}; allowed: floating point. Quantized weights are not "
            "served: use the model that they were made from"
        )
    part.target.copy_(values)


def _shard_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a model folder, by the tensor's name."""
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
            raise ConfigError(f"{index} names files that do not exist: {_some(missing)}")
        paths = [folder / name for name in sorted(names)]
    if not paths:
        raise ConfigError(f"{folder} has no *.safetensors files; other weight formats are not read{_hint(folder)}")
    files: dict[str, Path] = {}
    for path in paths:
        with _open(path, torch.device("cpu")) as shard:
            for name in shard.keys():  # noqa: SIM118  (the handle is no dict)
                if name in files:
                    raise ConfigError(f"{name} is in two files of {folder}: {files[name].name} and {path.name}")
                files[name] = path
    return files


def _hint(folder: Path) -> str:
    """What to do with the weights that are there."""
    if any(folder.glob("*.bin")):
        return (
            "; transformers converts *.bin: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(FOLDER)"
        )
    if any(folder.glob("*.gguf")):
        return "; *.gguf is llama.cpp's format: take the repository that the file was made from"
    return ""


def _check_names(config: ModelConfig, parts: dict[str, WeightPart], files: dict[str, Path]) -> None:
    missing = sorted(set(parts) - set(files))
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors that config.json asks for: {_some(missing)}")
    unexpected = sorted(name for name in set(files) - set(parts) if not _is_redundant(name, config))
    if unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that {config.architecture} with this config.json does "
            f"not have: {_some(unexpected)}"
        )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some exporters write and that say nothing new: a tied output projection, rope frequencies. And the
    scales of an FP8 KV cache, which `read_kv_scales` reads where there is one."""
    if _KV_SCALE.fullmatch(name):
        return True
    return (config.tie_word_embeddings and name == _OUTPUT) or name.endswith(".rotary_emb.inv_freq")


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@contextmanager
def _open(path: Path, device: torch.device) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _fill_with_noise(model: CausalLM) -> None:
    """Weights of a plausible size, the same at every start, so that nothing overflows on the way."""
    parameters = list(model.parameters())
    generator = torch.Generator(device=parameters[0].device).manual_seed(0)
    for parameter in parameters:
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
