"""4-bit checkpoints: what `quant_method` awq, gptq and compressed-tensors write about them.

Sources: AutoAWQ's quant_config; AutoGPTQ's and GPTQModel's quantize_config; compressed-tensors' QuantizationArgs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from minisgl_backend.weights.schemes.keys import PLAIN_INSTEAD, SchemeKeys

LEAST_GROUP = 16  # inputs: what tensor cores multiply at once
_HOW_IT_WAS_MADE = (
    "act_group_aware", "adapter", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_percent", "dataset", "device_map", "exllama_config", "fuse_max_seq_len", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_to_fuse", "mse", "offload_to_disk", "offload_to_disk_path", "pack_dtype", "pad_token_id",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Int4Scheme:
    """Numbers of 4 bits with a scale for each output and group of inputs; see `int4_checkpoint` for the layouts."""

    layout: Literal["awq", "gptq", "pack-quantized"]
    group: int  # inputs; -1: all
    symmetric: bool  # the zero point is 8, whatever the checkpoint has
    zero_offset: int = 0  # what is added to zero points of the file
    act_order: bool = False  # which group an input belongs to is in a tensor
    unread: tuple[str, ...] = ()  # suffixes of tensors that are of no use

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "with zero points"
        group = "one group an output" if self.group < 0 else f"groups of {self.group}"
        order = ", inputs in another order (desc_act)" if self.act_order else ""
        return f"4-bit weights ({self.layout}), {group}, {kind}{order}; activations as they are"


def read_awq(keys: SchemeKeys) -> Int4Scheme:
    """quant_method awq."""
    _bits(keys, "w_bit" if "w_bit" in keys.values else "bits")
    keys.choice("zero_point", (True,))
    if str(keys.get("version", "gemm")).lower() != "gemm":
        keys.refuse("version", f'"gemm"; {PLAIN_INSTEAD}')
    keys.without_effect(*_HOW_IT_WAS_MADE, "do_fuse")
    group = _group(keys, "q_group_size" if "q_group_size" in keys.values else "group_size", 128)
    return Int4Scheme(layout="awq", group=group, symmetric=False)


def read_gptq(keys: SchemeKeys) -> Int4Scheme:
    """quant_method gptq."""
    _bits(keys, "bits")
    keys.choice("lm_head", (False,))
    keys.choice("is_marlin_format", (False,))
    keys.without_effect(*_HOW_IT_WAS_MADE, "format", "dynamic")
    kind = keys.choice("checkpoint_format" if "checkpoint_format" in keys.values else "format", ("gptq", "gptq_v2"))
    symmetric = keys.choice("sym", (True, False))
    act_order = keys.choice("desc_act", (False, True))
    return Int4Scheme(
        layout="gptq",
        group=_group(keys, "group_size", 128),
        symmetric=symmetric,
        zero_offset=1 if kind == "gptq" else 0,  # the first version stores a zero point less one
        act_order=act_order,
        # AutoGPTQ writes biases of zeros for layers that have none.
        unread=("bias", *(("qzeros",) if symmetric else ()), *(() if act_order else ("g_idx",))),
    )


def gptq_exceptions(keys: SchemeKeys) -> tuple[tuple[str, Mapping[str, object] | None], ...]:
    """GPTQModel's `dynamic`: regular expressions of module paths, and what is different there; None: they are plain.
    The first that matches holds."""
    dynamic = keys.child("dynamic")
    found: list[tuple[str, Mapping[str, object] | None]] = []
    for pattern in dynamic.values if dynamic is not None else ():
        changes = dynamic.get(pattern, {}) if dynamic is not None else {}
        if dynamic is not None and not isinstance(changes, dict):
            dynamic.refuse(pattern, "a JSON object")
        if pattern.startswith("-:"):
            found.append((pattern[2:], None))
        else:
            found.append((pattern.removeprefix("+:"), changes))
    return tuple(found)


def read_compressed_tensors(keys: SchemeKeys) -> Int4Scheme | None:
    """A group of compressed-tensors."""
    weights = keys.child("weights")
    if weights is None or weights.get("type", "int") != "int" or keys.get("format") != "pack-quantized":
        return None
    _bits(weights, "num_bits")
    if keys.get("input_activations") is not None:
        keys.refuse("input_activations", f"null, with 4-bit weights; {PLAIN_INSTEAD}")
    weights.choice("dynamic", (False,))
    weights.without_effect("observer", "observer_kwargs", "zp_dtype", "scale_dtype", "block_structure")
    symmetric = weights.choice("symmetric", (True, False))
    grain = weights.choice(
        "strategy", ("group", "channel"), "channel" if weights.get("group_size") is None else "group"
    )
    group = _group(weights, "group_size", 128) if grain == "group" else -1
    weights.without_effect("group_size")
    order = weights.choice("actorder", ("group", "weight", "static", "dynamic", False, True), False)
    weights.check_unread()
    return Int4Scheme(
        layout="pack-quantized",
        group=group,
        symmetric=symmetric,
        act_order=order in ("group", "dynamic", True),
        unread=("weight_shape",),
    )


def _bits(keys: SchemeKeys, name: str) -> None:
    if keys.get(name) != 4:
        keys.refuse(name, f"4, of integers without quantized activations; {PLAIN_INSTEAD}")


def _group(keys: SchemeKeys, name: str, default: int) -> int:
    value = keys.get(name, default)
    if type(value) is not int or (value != -1 and (value < LEAST_GROUP or value % LEAST_GROUP)):
        keys.refuse(name, f"multiples of {LEAST_GROUP}, or -1")
    return value
