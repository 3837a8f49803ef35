"""From a model folder to the encoder of its images on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl_backend.encoders.base import Encoder
from minisgl_backend.encoders.names import NAMES, WITHIN
from minisgl_backend.kernels.select import select_kernels, select_ops
from minisgl_backend.layers.encoder_config import EncoderConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.loader import load_weights
from minisgl_backend.weights.methods import WeightMethods
from minisgl_backend.weights.parts import check_filled


def build_encoder(
    config: EncoderConfig,
    model_dir: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    model: str,
    dummy_weights: bool = False,
) -> Encoder:
    """Ready to encode; whole on each rank. `model`: its name in messages.

    Raises ConfigError naming tensors that are missing, unexpected or of another shape than config.json says.
    """
    ops = select_ops(device, None, dtype)
    methods = WeightMethods(QuantizationConfig(), select_kernels(ops, device), dtype=dtype, device=device)
    single = TensorParallel.single()
    context = LayerContext(device=device, dtype=dtype, ops=ops, tp=single, methods=methods, path=WITHIN[:-1])
    encoder: Encoder = load_attribute(config.module)(config, context).eval()
    layers = [module for module in encoder.modules() if isinstance(module, WeightedLayer)]
    parts = [part for layer in layers for part in layer.weight_parts()]
    check_filled(parts, encoder.named_parameters())
    if dummy_weights:
        generator = torch.Generator(device=device).manual_seed(0)
        for layer in layers:
            layer.fill_with_noise(generator)
    else:
        checkpoint = Checkpoint(Path(model_dir), NAMES)
        load_weights(parts, NAMES, checkpoint, device, _no_progress, model=model, is_redundant=_is_unused)
    encoder.derive_weights()
    return encoder


def _no_progress(done: int, total: int) -> None:
    """The decoder's weights are most of what is read."""


def _is_unused(name: str) -> bool:
    """SigLIP's head, which some checkpoints have, and what can be computed."""
    return ".head." in name or name.endswith(("position_ids", ".inv_freq"))
