"""FP8 checkpoints: what `quant_method` fp8, compressed-tensors and ModelOpt write about them.

Sources: Qwen3-FP8's and DeepSeek-V3's config.json; transformers' FineGrainedFP8Config; compressed-tensors'
QuantizationArgs; ModelOpt's hf_quant_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl_backend.weights.schemes.keys import PLAIN_INSTEAD, SchemeKeys


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """Weights in e4m3 with float32 scales, stored beside them as `<module>.<scale>`."""

    scale: str = "weight_scale"  # suffix of the scales' tensor
    grain: str  # of the weights' scales: tensor, channel (one an output) or block
    block: tuple[int, int] | None = None  # outputs and inputs of a block
    column: bool = False  # scales of channels are stored as [outputs, 1]
    activations: str | None = (
        "token"  # scale of a token, a group (as long as a block) or a static tensor; None: 16 bits
    )
    unread: tuple[str, ...] = ()  # suffixes of tensors that are of no use

    def __str__(self) -> str:
        weights = {"tensor": "a scale a tensor", "channel": "a scale an output"}.get(self.grain)
        if self.block is not None:
            weights = f"blocks of {self.block[0]} x {self.block[1]}"
        activations = {
            "token": "FP8 with a scale a token",
            "group": f"FP8 in groups of {self.block[1] if self.block else 0}",
            "static": "FP8 with the checkpoint's scale",
            None: "as they are",
        }[self.activations]
        return f"FP8 weights, {weights}; activations {activations}"


def read_fp8(keys: SchemeKeys) -> Fp8Scheme:
    """quant_method fp8: blocks, or one scale a tensor."""
    keys.choice("fmt", ("e4m3", "float8_e4m3fn"))
    keys.choice("scale_fmt", ("float", "ue8m0"))  # powers of two, which float32 holds as well
    keys.choice("expert_dtype", ("fp8",))  # of transformers: DeepSeek-V4 has experts in another format
    keys.without_effect("dequantize")
    keys.choice("weight_per_tensor", (False,))
    block = keys.get("weight_block_size")
    if block is None:
        return _per_tensor(static=keys.choice("activation_scheme", ("dynamic", "static")) == "static")
    keys.choice("activation_scheme", ("dynamic",))
    return _in_blocks("weight_scale_inv", _block(keys, "weight_block_size", block))


def read_modelopt(keys: SchemeKeys) -> Fp8Scheme:
    """quant_method modelopt."""
    keys.without_effect("producer", "config_groups")
    if str(keys.get("quant_algo", "")).upper() == "FP8_PER_CHANNEL_PER_TOKEN":
        return Fp8Scheme(grain="channel")
    if str(keys.get("quant_algo", "")).upper() != "FP8":
        keys.refuse("quant_algo", f"FP8, FP8_PER_CHANNEL_PER_TOKEN; {PLAIN_INSTEAD}")
    return _per_tensor(static=True)


def read_compressed_tensors(keys: SchemeKeys) -> Fp8Scheme | None:
    """A group of compressed-tensors."""
    weights = keys.child("weights")
    if weights is None or (weights.get("type", "int"), weights.get("num_bits", 8)) != ("float", 8):
        return None
    keys.choice("format", ("float-quantized", "naive-quantized"))
    weights.choice("symmetric", (True,))
    weights.choice("dynamic", (False,))
    weights.without_effect("observer", "observer_kwargs", "group_size", "zp_dtype", "scale_dtype", "actorder")
    grain = weights.choice("strategy", ("tensor", "channel", "block"))
    block = _block(weights, "block_structure", weights.get("block_structure")) if grain == "block" else None
    weights.without_effect("block_structure")
    weights.check_unread()
    activations = keys.child("input_activations")
    if activations is None:
        return Fp8Scheme(grain=grain, block=block, column=grain == "channel", activations=None)
    activations.choice("type", ("float",))
    activations.choice("num_bits", (8,))
    activations.choice("symmetric", (True,))
    activations.without_effect("observer", "observer_kwargs", "zp_dtype", "scale_dtype", "actorder", "block_structure")
    dynamic = activations.choice("dynamic", (False, True))
    if block is not None:
        activations.choice("strategy", ("group",))
        activations.choice("group_size", (block[1],))
        activations.choice("dynamic", (True,))
        activations.check_unread()
        return _in_blocks("weight_scale", block)
    activations.choice("strategy", ("tensor", "token") if dynamic else ("tensor",))
    activations.without_effect("group_size")
    activations.check_unread()
    return Fp8Scheme(grain=grain, column=grain == "channel", activations="token" if dynamic else "static")


def _per_tensor(*, static: bool) -> Fp8Scheme:
    unread = () if static else ("input_scale",)
    return Fp8Scheme(grain="tensor", activations="static" if static else "token", unread=unread)


def _in_blocks(scale: str, block: tuple[int, int]) -> Fp8Scheme:
    return Fp8Scheme(scale=scale, grain="block", block=block, activations="group")


def _block(keys: SchemeKeys, key: str, value: Any) -> tuple[int, int]:
    sizes = (32, 64, 128)
    if not isinstance(value, list) or len(value) != 2 or not all(one in sizes for one in value):
        keys.refuse(key, f"[outputs, inputs], each of {', '.join(map(str, sizes))}")
    return value[0], value[1]
