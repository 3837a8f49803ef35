"""Scales of an FP8 KV cache that come with a checkpoint."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.layout import KVScales
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.names import TensorNames

log = logging.getLogger(__name__)

# As compressed-tensors and ModelOpt write them, and AutoFP8, whose older checkpoints have one for both; older ones of
# compressed-tensors have those of what k_proj and v_proj return.
_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<kind>k|v|kv)_scale|(?P<output>k|v)_proj\.output_scale)"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of the checkpoint is a scale of the cache."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(num_layers: int, model_dir: str | Path, names: TensorNames) -> list[KVScales]:
    """By layer: the scales of the checkpoint, and 1 where it has none. `names`: of its tensors.

    Raises ConfigError for a scale that is not a finite number above 0.
    """
    scales = [{"k": 1.0, "v": 1.0} for _ in range(num_layers)]
    found = 0
    checkpoint = Checkpoint(Path(model_dir), names)
    for name in checkpoint.names():
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= num_layers:
            continue
        tensor = checkpoint.tensor(name).float()
        value = tensor.item() if tensor.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            raise ConfigError(
                f"{checkpoint.path(name)}: {name} is {tensor.tolist()}; allowed: one finite number above 0"
            )
        scales[int(match["layer"])].update(dict.fromkeys(match["kind"] or match["output"], value))
        found += 1
    log.info("FP8 KV cache: %d scales of the checkpoint, 1 for the others", found)
    return [KVScales(**values) for values in scales]
