"""4-bit checkpoints: what `quant_method` awq, gptq and compressed-tensors write about them.

Sources: AutoAWQ's quant_config; AutoGPTQ's and GPTQModel's quantize_config; AutoRound's exports; compressed-tensors'
QuantizationArgs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from minisgl_backend.weights.schemes.arguments import QuantizationArgs
from minisgl_backend.weights.schemes.keys import PLAIN_INSTEAD, SchemeKeys

LEAST_GROUP = 16  # inputs: what tensor cores multiply at once
_GPTQ_1 = ("auto_round:auto_gptq", "auto_round:gptq", "auto")  # the last two as transformers and older releases say it
_AUTO_ROUND = (*_GPTQ_1, "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq", "auto_round:awq")


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
    """quant_method awq, whose zero points are in the file whatever they are."""
    _bits(keys, "w_bit" if "w_bit" in keys.values else "bits")
    layouts = [_layout(keys, key, ("gemm",)) for key in ("version", "format", "checkpoint_format")]
    if str(keys.get("backend", "")).lower() == "llm-awq":  # packs in another order
        keys.refuse("backend", f'"autoawq", or absent; {PLAIN_INSTEAD}')
    keys.without_effect("desc_act")  # of GPTQ: GPTQModel writes it, but no order of inputs
    symmetric = keys.choice("sym", (False, True))
    # AutoAWQ writes none without zero points; GPTQModel and AutoRound, which do, say more of the layout.
    told = symmetric or layouts[1:] != [None, None]
    keys.choice("zero_point", (True, False) if told else (True,), default=not symmetric)
    group = _group(keys, "q_group_size" if "q_group_size" in keys.values else "group_size", 128)
    return Int4Scheme(layout="awq", group=group, symmetric=False)


def read_gptq(keys: SchemeKeys) -> Int4Scheme:
    """quant_method gptq."""
    _bits(keys, "bits")
    keys.choice("lm_head", (False,))
    keys.choice("is_marlin_format", (False,))
    keys.without_effect("backend")
    kinds = {_layout(keys, key, ("gptq", "gptq_v2")) for key in ("checkpoint_format", "format")} - {None}
    if len(kinds) > 1:
        keys.refuse("checkpoint_format", f"what format is, {json.dumps(keys.get('format'))}")
    return _gptq(
        keys,
        act_order=keys.choice("desc_act", (False, True)),
        zero_offset=0 if kinds == {"gptq_v2"} else 1,  # the first version stores a zero point less one
    )


def read_auto_round(keys: SchemeKeys) -> Int4Scheme:
    """quant_method auto-round: AutoRound's own export, in the layout of GPTQ or of AWQ. Early releases name the layout
    in `backend` alone, all but a few GPTQ's, which every reader takes where no key names one."""
    _bits(keys, "bits")
    backend = str(keys.get("backend", ""))
    if keys.get("packing_format") is None and "awq" in backend:
        keys.refuse(
            "packing_format", f"{', '.join(map(json.dumps, _AUTO_ROUND))}, beside backend {json.dumps(backend)}"
        )
    kind = keys.word("packing_format", _AUTO_ROUND)
    if kind.endswith("awq"):
        keys.choice("sym", (True, False))
        return Int4Scheme(layout="awq", group=_group(keys, "group_size", 128), symmetric=False)
    return _gptq(keys, act_order=False, zero_offset=1 if kind in _GPTQ_1 else 0)


def _gptq(keys: SchemeKeys, *, act_order: bool, zero_offset: int) -> Int4Scheme:
    symmetric = keys.choice("sym", (True, False))
    return Int4Scheme(
        layout="gptq",
        group=_group(keys, "group_size", 128),
        symmetric=symmetric,
        zero_offset=zero_offset,
        act_order=act_order,
        # AutoGPTQ writes biases of zeros for layers that have none.
        unread=("bias", *(("qzeros",) if symmetric else ()), "g_idx"),
    )


def read_compressed_tensors(keys: SchemeKeys) -> Int4Scheme | None:
    """A group of compressed-tensors."""
    weights = QuantizationArgs.read(keys, "weights")
    if weights is None or weights.type != "int" or keys.get("format") != "pack-quantized":
        return None
    weights.allow(num_bits=(4,))
    if keys.child("input_activations") is not None:
        keys.refuse("input_activations", f"null, with 4-bit weights; {PLAIN_INSTEAD}")
    weights.allow(dynamic=(False,), strategy=("group", "channel"))
    group = _group(weights.keys, "group_size", 128) if weights.strategy == "group" else -1
    act_order = weights.reorders()
    weights.check_unread("block_structure")
    return Int4Scheme(
        layout="pack-quantized",
        group=group,
        symmetric=weights.symmetric,
        act_order=act_order,
        unread=("weight_shape", "weight_g_idx"),
    )


def _bits(keys: SchemeKeys, name: str) -> None:
    if keys.integer(name) != 4:
        keys.refuse(name, f"4, of integers without quantized activations; {PLAIN_INSTEAD}")


def _layout(keys: SchemeKeys, name: str, served: tuple[str, ...]) -> str | None:
    """What a key says of how numbers are packed; None where it is absent."""
    value = keys.get(name)
    if value is not None and str(value).lower() not in served:
        keys.refuse(name, f"{', '.join(map(json.dumps, served))}; {PLAIN_INSTEAD}")
    return None if value is None else str(value).lower()


def _group(keys: SchemeKeys, name: str, default: int) -> int:
    value = keys.integer(name, default)
    if value is None or (value != -1 and (value < LEAST_GROUP or value % LEAST_GROUP)):
        keys.refuse(name, f"multiples of {LEAST_GROUP}, or -1")
    return value
