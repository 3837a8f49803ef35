"""The encoder of a model that sees, at start: what the runner holds of it, and what the scheduler knows."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.encoders.build import build_encoder
from minisgl_backend.errors import ConfigError
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.row_images import RowImages
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.vectors import Vectors
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.sizes import ITEM_BYTES

# What a patch takes beside its state while a layer computes it, in hidden sizes: queries, keys and values, also in
# float32 while they are rotated.
_LAYER_SHARE = 24
_LARGEST_IMAGE = 16384  # patches that memory is kept free for; where a larger one does not fit, its request fails
_CAPTURED = 4096  # likewise: of encodings that are captured (`encoders.graphs.MOST_PATCHES`)
_ATTENTION = 1.5  # how much longer than in GEMMs an operation takes in attention: 330 to 400 TFLOP/s
# What opens segments of pixels; by name, since rooms of one level do not import each other.
OPEN_PIXELS = "minisgl_backend.images.segments:open_pixels"


def make_vectors(
    runtime: RuntimeConfig, config: ModelConfig, model: Any, tp: TensorParallel, device: torch.device
) -> Vectors:
    """`model`: the decoder."""
    limits = encoder_limits(runtime, config)
    assert config.encoder is not None, "it is asked for where there is one"
    assert limits is not None, "it has an encoder"
    try:
        encoder = build_encoder(
            config.encoder,
            runtime.model_dir,
            device=device,
            dtype=getattr(torch, runtime.dtype),
            model=config.architecture,
            dummy_weights=runtime.config.dummy_weights,
        )
    except ConfigError as error:
        raise ConfigError(f"{error}; with encoder_cache_mib 0 the model reads text alone") from error
    tables, max_rows = tuple(model.ropes), runtime.most_decode_entries + 1
    rows = RowImages(
        max_rows,
        limits,
        merge=config.encoder.merge,
        has_axes=any(table.axes is not None for table in tables),
        open_pixels=load_attribute(OPEN_PIXELS),
    )
    return Vectors(encoder, rows, tables, max_rows, tp)


def reserved_bytes(runtime: RuntimeConfig, config: ModelConfig) -> int:
    """Of a GPU, beside the encoder's weights: its cache, and what a large image takes while it is encoded."""
    limits = encoder_limits(runtime, config)
    if limits is None or config.encoder is None:
        return 0
    in_layer = _LAYER_SHARE * config.encoder.hidden_size * ITEM_BYTES[runtime.dtype]
    return limits.capacity + (_LARGEST_IMAGE + _CAPTURED) * (limits.state_bytes + in_layer)


def encoder_limits(runtime: RuntimeConfig, config: ModelConfig) -> EncoderLimits | None:
    """None: it reads text alone. Costs follow from the operations of encoder and decoder."""
    capacity, encoder = runtime.config.encoder_cache_bytes, config.encoder
    if encoder is None:
        return None
    item = ITEM_BYTES[runtime.dtype]
    per_token = 2 * config.layer_weights_per_token
    per_patch, per_pair = encoder.operations()
    return EncoderLimits(
        num_layers=encoder.num_layers,
        capacity=capacity,
        vector_bytes=encoder.width * item,
        state_bytes=encoder.state_size(item),
        patch_area=encoder.patch_size**2,
        patch_cost=per_patch / per_token,
        pair_cost=_ATTENTION * per_pair / per_token,
        begin_cost=encoder.begin_operations() / per_token,
        plane_cost=encoder.plane_operations() / per_token,
        context_cost=_ATTENTION * _context_operations(config) / per_token,
        part_patches=encoder.part_patches,
        window=None if encoder.window is None else encoder.window**2,
        full_layers=encoder.full_layers,
        plane_layers=encoder.plane_layers,
        num_ranks=runtime.config.tp,
        bidirectional=encoder.bidirectional != "none",
    )


def _context_operations(config: ModelConfig) -> int:
    """Of a prompt token and one that it sees, in all layers of the decoder that see everything."""
    every = (layer.mixer.attention for layer in config.layers)
    seeing = [one for one in every if one is not None and one.window is None and one.chunk is None]
    return sum(4 * one.num_q_heads * one.head_dim for one in seeing)
