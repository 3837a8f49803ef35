"""From a model folder to a model on its device: builds the modules and has their weights loaded."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.needs import AttentionNeeds, Scores
from minisgl_backend.kernels.select import block_types, select_kernels, select_ops
from minisgl_backend.kv.grouping import group_layers
from minisgl_backend.kv.groups import MOST_GROUPS
from minisgl_backend.kv.kinds import kind_of
from minisgl_backend.kv.layout import LayerCache
from minisgl_backend.layers.mixer import cache_of, page_state_of
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.weights.files import Checkpoint, Readable
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.gguf import log_kept
from minisgl_backend.weights.kv_scales import is_kv_scale
from minisgl_backend.weights.loader import load_weights
from minisgl_backend.weights.methods import WeightMethods
from minisgl_backend.weights.parts import WeightPart, check_filled
from minisgl_backend.weights.schemes.gguf import with_blocks

log = logging.getLogger(__name__)

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_AT_ONCE = 8192  # of both, while they are compared


def build_model(config: ModelConfig, model_dir: str | Path, load: LoadConfig) -> CausalLM:
    """The model of one rank, ready to run.

    Raises ConfigError naming tensors that are missing, unexpected, in two files or of another shape than config.json
    says.
    """
    formats = config.quantization.with_option(load.quantization)
    if not load.dummy_weights and load.ops is None:
        types = block_types(load.device, load.dtype, config.mixture is not None)
        formats = with_blocks(formats, Path(model_dir), types)
    layer_context = layer_context_of(config, formats, load)
    checkpoint = None if load.dummy_weights else Checkpoint(Path(model_dir), config.tensor_names)
    if checkpoint is not None and config.tie_word_embeddings and not _is_tied(checkpoint):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    model = CausalLM(config, layer_context, load.max_seq_len).eval()
    check_filled(weight_parts(model), model.named_parameters())
    if checkpoint is None:
        _fill_with_noise(model)
    else:
        _load(model, config, formats, checkpoint, load)
        log_kept(model)
    model.derive_weights()
    return model


def layer_context_of(config: ModelConfig, formats: QuantizationConfig, load: LoadConfig) -> LayerContext:
    """The context of a whole model on one rank. Raises ConfigError unless it splits over the ranks."""
    dtype, device = load.dtype, load.device
    config.check_tensor_parallel(load.tp.size)
    ops = load.ops or select_ops(device, config.hidden_size, dtype, is_mixture=config.mixture is not None)
    methods = WeightMethods(formats, select_kernels(ops, device), dtype=dtype, device=device)
    return LayerContext(device=device, dtype=dtype, ops=ops, tp=load.tp, methods=methods)


def attention_needs(
    config: ModelConfig, *, tp_size: int, compute_capability: int | None, dtype: str, kv_dtype: str
) -> AttentionNeeds:
    """What attention backends must serve for this model on a machine, on each of `tp_size` ranks."""
    kinds = config.attentions
    return AttentionNeeds(
        compute_capability=compute_capability,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dims=config.head_dims,
        num_q_heads=max(kind.num_q_heads for kind in kinds) // tp_size,
        scores=Scores(
            soft_cap=any(kind.soft_cap is not None for kind in kinds),
            sinks=any(kind.sinks for kind in kinds),
            chunks=any(kind.chunk is not None for kind in kinds),
            not_causal=config.encoder is not None and config.encoder.bidirectional != "none",
        ),
        latents=config.latents,
    )


def attention_spec(
    config: ModelConfig,
    blank: AttentionSpec,
    *,
    tp_size: int,
    kv_dtype: torch.dtype | None = None,
    most_cache_groups: int = MOST_GROUPS,
) -> AttentionSpec:
    """What attention backends and the KV pool of one rank must serve for this model: `blank` with groups.

    `kv_dtype`: of keys and values in the cache; None: that of queries. `most_cache_groups`: see `kv.grouping`; with
    one, layers that differ in windows keep all tokens.
    """
    max_seq_len = blank.max_seq_len
    caches = (cache_of(layer.mixer, tp_size, kv_dtype or blank.dtype, max_seq_len) for layer in config.layers)
    kinds = [kind for kind in caches if kind is not None]
    kept = [LayerCache(kind_of(kind.window, kind.chunk, max_seq_len), kind.kv) for kind in kinds]
    states = (page_state_of(layer.mixer, tp_size, blank.dtype, blank.max_drafts) for layer in config.layers)
    page_states = tuple(state for state in states if state is not None)
    grouped = group_layers(kept, blank.page_size, max_seq_len, 1 if page_states else most_cache_groups)
    alike = list(zip(kinds, grouped.group_of_layer, strict=True))
    groups = tuple(
        dataclasses.replace(
            kind,
            layers=tuple(index for index, other in enumerate(alike) if other == (kind, cache_group)),
            cache_group=cache_group,
        )
        for kind, cache_group in dict.fromkeys(alike)
    )
    return dataclasses.replace(blank, groups=groups, cache_groups=grouped.groups, page_states=page_states)


def weight_parts(model: CausalLM) -> list[WeightPart]:
    """All that the model needs of a checkpoint."""
    layers = (module for module in model.modules() if isinstance(module, WeightedLayer))
    return [part for layer in layers for part in layer.weight_parts()]


def _load(
    model: CausalLM, config: ModelConfig, formats: QuantizationConfig, checkpoint: Checkpoint, load: LoadConfig
) -> None:
    others = config.draft_prefixes[:1] if load.uses_draft_layer else ()  # these are loaded elsewhere
    left_out = tuple(prefix for prefix in config.tensor_names.left_out if prefix not in others)
    if config.encoder is not None:  # which reads what is left out here
        others, left_out = (*others, *left_out), ()
    source: Readable = checkpoint
    if load.merge is not None:
        source = load.merge(checkpoint, config.tensor_names, config.tie_word_embeddings)
    load_weights(
        weight_parts(model),
        dataclasses.replace(config.tensor_names, left_out=left_out),
        source,
        load.device,
        load.on_progress,
        model=config.architecture,
        is_redundant=lambda name: name.startswith(others) or is_redundant(name, config, formats),
    )


def is_redundant(name: str, config: ModelConfig, formats: QuantizationConfig) -> bool:
    """Tensors that some exporters write and that say nothing new: a tied output projection, rope frequencies, what a
    number format has no use for. And the scales of an FP8 KV cache, which `read_kv_scales` reads where there is one."""
    tied = config.tie_word_embeddings and name == _OUTPUT
    return tied or name.endswith(".rotary_emb.inv_freq") or is_kv_scale(name) or formats.is_unread(name)


def _is_tied(checkpoint: Checkpoint) -> bool:
    """False where the checkpoint has an output projection other than its embedding: it counts then, as in
    transformers 5, whatever config.json says."""
    if _EMBEDDING not in checkpoint or _OUTPUT not in checkpoint:
        return True
    with checkpoint.open(_EMBEDDING) as embedding, checkpoint.open(_OUTPUT) as output:
        num_rows = embedding.get_shape()[0]
        if output.get_shape() == embedding.get_shape() and all(
            torch.equal(embedding[start : start + _ROWS_AT_ONCE], output[start : start + _ROWS_AT_ONCE])
            for start in range(0, num_rows, _ROWS_AT_ONCE)
        ):
            return True
    log.warning(
        "%s: config.json says tie_word_embeddings, but the checkpoint's %s differs from %s; it is used, as by "
        "transformers 5. Set tie_word_embeddings to false, or remove that tensor.",
        checkpoint.folder,
        _OUTPUT,
        _EMBEDDING,
    )
    return False


def _fill_with_noise(model: CausalLM) -> None:
    """Weights of a plausible size, the same at every start, so that nothing overflows on the way."""
    layers = [module for module in model.modules() if isinstance(module, WeightedLayer)]
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    for layer in layers:
        layer.fill_with_noise(generator)
