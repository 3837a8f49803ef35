"""FP8 checkpoints: what `quant_method` fp8, compressed-tensors and ModelOpt write about them.

Sources: Qwen3-FP8's and DeepSeek-V3's config.json; transformers' FineGrainedFP8Config; compressed-tensors'
QuantizationArgs; ModelOpt's hf_quant_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.weights.schemes.arguments import QuantizationArgs, block
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
    keys.word("fmt", ("e4m3", "float8_e4m3fn"))
    keys.word("scale_fmt", ("float", "ue8m0"))  # powers of two, which float32 holds as well
    keys.choice("expert_dtype", ("fp8",))  # of transformers: DeepSeek-V4 has experts in another format
    keys.choice("weight_per_tensor", (False,))
    size = keys.get("weight_block_size")
    if size is None:
        return _per_tensor(static=keys.word("activation_scheme", ("dynamic", "static")) == "static")
    keys.word("activation_scheme", ("dynamic",))
    return _in_blocks("weight_scale_inv", block(keys, "weight_block_size", size))


def read_modelopt(keys: SchemeKeys) -> Fp8Scheme | None:
    """quant_method modelopt. None: weights are plain, and only the cache was calibrated."""
    keys.without_effect("config_groups")  # the same once more, in the words of compressed-tensors
    algorithm = keys.get("quant_algo")
    if algorithm is None and keys.child("config_groups") is None:
        return None
    if str(algorithm).upper() == "FP8_PER_CHANNEL_PER_TOKEN":
        return Fp8Scheme(grain="channel")
    if str(algorithm).upper() != "FP8":
        keys.refuse("quant_algo", f"FP8, FP8_PER_CHANNEL_PER_TOKEN; {PLAIN_INSTEAD}")
    return _per_tensor(static=True)


def read_compressed_tensors(keys: SchemeKeys) -> Fp8Scheme | None:
    """A group of compressed-tensors."""
    weights = QuantizationArgs.read(keys, "weights")
    if weights is None or (weights.type, weights.num_bits) != ("float", 8):
        return None
    keys.choice("format", ("float-quantized", "naive-quantized"))
    weights.allow(symmetric=(True,), dynamic=(False,), strategy=("tensor", "channel", "block"))
    size = weights.block_structure() if weights.strategy == "block" else None
    weights.check_unread("group_size", "actorder", "block_structure")
    activations = QuantizationArgs.read(keys, "input_activations")
    column = weights.strategy == "channel"
    if activations is None:
        return Fp8Scheme(grain=weights.strategy, block=size, column=column, activations=None)
    activations.allow(type=("float",), num_bits=(8,), symmetric=(True,))
    if size is not None:
        activations.allow(strategy=("group",), group_size=(size[1],), dynamic=(True,))
    else:
        activations.allow(dynamic=(False, True))
        activations.allow(strategy=("tensor", "token") if activations.dynamic else ("tensor",))
    activations.check_unread("actorder", "block_structure")
    if size is not None:
        return _in_blocks("weight_scale", size)
    return Fp8Scheme(grain=weights.strategy, column=column, activations="token" if activations.dynamic else "static")


def _per_tensor(*, static: bool) -> Fp8Scheme:
    unread = () if static else ("input_scale",)
    return Fp8Scheme(grain="tensor", activations="static" if static else "token", unread=unread)


def _in_blocks(scale: str, size: tuple[int, int]) -> Fp8Scheme:
    return Fp8Scheme(scale=scale, grain="block", block=size, activations="group")
