"""What a layer's description may say, against the same in plain torch: norms, activations, ropes, scores; on ranks."""

from __future__ import annotations

import dataclasses
import math
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from minisgl_backend.attention.base import PrefillInputs
from minisgl_backend.attention.pair import StepAttention
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.layers.config import LayerConfig, MlpConfig, UngatedMlpConfig
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.mixer_config import AttentionConfig, NormConfig, NormOverHeadsAttentionConfig, RopeConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Residual, join
from minisgl_backend.layers.weights import WeightedLayer
from minisgl_backend.models.decoder import decoder_layer
from minisgl_backend.tensor_parallel import TensorParallel
from tests.layer_contexts import layer_context
from tests.specs import make_pool, one_group

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, DIM, TOKENS = 48, 4, 2, 16, 21
EPS = 1e-5
PLAIN = LayerConfig(
    mixer=AttentionConfig(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=RopeConfig()),
    mlp=MlpConfig(intermediate_size=64),
    norm=NormConfig(eps=EPS),
)


def with_attention(**changes: object) -> LayerConfig:
    return PLAIN.with_mixer(**changes)


GEMMA = NormConfig(eps=EPS, weight_offset=1.0)
LAYER_NORM = NormConfig(eps=EPS, kind="layer", bias=True, weight_offset=1.0)
LAYERS = {
    "plain": PLAIN,
    "after": dataclasses.replace(PLAIN, norms="after"),
    "both, with offset": dataclasses.replace(
        PLAIN, norms="both", norm=GEMMA, mlp=MlpConfig(intermediate_size=64, activation="gelu_tanh")
    ),
    "gelu": dataclasses.replace(PLAIN, mlp=MlpConfig(intermediate_size=64, activation="gelu")),
    "multiplier": dataclasses.replace(PLAIN, residual_multiplier=0.22),
    "both with multiplier": dataclasses.replace(PLAIN, norms="both", residual_multiplier=0.5),
    "head norms with offset": with_attention(qk_norm=GEMMA),
    "norms over heads": dataclasses.replace(
        PLAIN,
        mixer=NormOverHeadsAttentionConfig(
            num_q_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            qk_norm=NormConfig(eps=EPS),
            rope=RopeConfig(rotary_dim=8),
        ),
    ),
    "partial rotary": with_attention(rope=RopeConfig(rotary_dim=8), qk_norm=NormConfig(eps=EPS), qkv_bias=True),
    "no rope": with_attention(rope=None),
    "linear rope": with_attention(rope=RopeConfig(type="linear", factor=4.0)),
    "soft cap and window": with_attention(soft_cap=1.5, window=7, scale=0.4),
    "layer norms": dataclasses.replace(PLAIN, norm=LAYER_NORM),
    "layer norms, after": dataclasses.replace(PLAIN, norm=LAYER_NORM, norms="after"),
    "parallel": dataclasses.replace(PLAIN, norms="parallel", residual_multiplier=0.5),
    "parallel, layer norm": dataclasses.replace(PLAIN, norm=LAYER_NORM, norms="parallel"),
    "MLP biases": dataclasses.replace(PLAIN, mlp=MlpConfig(intermediate_size=64, bias=True)),
    "no gate": dataclasses.replace(PLAIN, mlp=UngatedMlpConfig(intermediate_size=64, activation="relu2", bias=True)),
    "no gate, parallel": dataclasses.replace(
        PLAIN, mlp=UngatedMlpConfig(intermediate_size=64, activation="gelu_tanh"), norms="parallel"
    ),
    "sinks": with_attention(sinks=True, output_bias=True),
}  # fmt: skip


def norm(x: torch.Tensor, weight: torch.Tensor, config: NormConfig) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.eps) * (weight + config.weight_offset)


def rotate(x: torch.Tensor, rope: RopeConfig | None) -> torch.Tensor:
    """x [tokens, heads, head_dim], as transformers does it."""
    if rope is None:
        return x
    width = rope.rotary_dim or x.shape[-1]
    speed = rope.theta ** (-torch.arange(0, width, 2) / width) / rope.factor
    angles = torch.outer(torch.arange(len(x)).float(), speed)
    cos, sin = (torch.cat([one, one], -1)[:, None] for one in (angles.cos(), angles.sin()))
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
    return torch.cat([turned * cos + half * sin, rest], -1)


def reference(layer: LayerConfig, w: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    config = layer.mixer

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x, f"self_attn.{name}_proj") for name in "qkv")
        heads = {"q": HEADS, "k": KV_HEADS}
        over_heads = isinstance(config, NormOverHeadsAttentionConfig)
        if config.qk_norm is not None and over_heads:
            q, k = (norm(one, w[f"self_attn.{name}_norm.weight"], config.qk_norm) for name, one in (("q", q), ("k", k)))
        q, k, v = q.view(-1, heads["q"], DIM), k.view(-1, heads["k"], DIM), v.view(-1, heads["k"], DIM)
        if config.qk_norm is not None and not over_heads:
            q, k = (norm(one, w[f"self_attn.{name}_norm.weight"], config.qk_norm) for name, one in (("q", q), ("k", k)))
        q, k = rotate(q, config.rope), rotate(k, config.rope)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (config.scale or DIM**-0.5)
        if config.soft_cap is not None:
            scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
        age = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        scores = scores.masked_fill((age < 0) | (age >= (config.window or math.inf)), -math.inf)
        if config.sinks:
            sinks = w["self_attn.sinks"].view(-1, 1, 1).expand(-1, TOKENS, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), "self_attn.o_proj")

    def mlp(x: torch.Tensor) -> torch.Tensor:
        act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}
        act["relu2"] = lambda y: F.relu(y) ** 2
        if isinstance(layer.mlp, UngatedMlpConfig):
            return linear(act[layer.mlp.activation](linear(x, "mlp.up_proj")), "mlp.down_proj")
        gate = act[layer.mlp.activation](linear(x, "mlp.gate_proj"))
        return linear(gate * linear(x, "mlp.up_proj"), "mlp.down_proj")

    def hidden_norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if layer.norm.kind == "rms":
            return norm(x, w[f"{name}_layernorm.weight"], layer.norm)
        return F.layer_norm(x, (HIDDEN,), w[f"{name}_layernorm.weight"] + 1, w[f"{name}_layernorm.bias"], EPS)

    if layer.norms == "parallel":
        x = hidden_norm(hidden, "input")
        return hidden + layer.residual_multiplier * (attention(x) + mlp(x))
    names = {
        "before": (("input", None), ("post_attention", None)),
        "after": ((None, "post_attention"), (None, "post_feedforward")),
        "both": (("input", "post_attention"), ("pre_feedforward", "post_feedforward")),
    }[layer.norms]
    for sublayer, (before, after) in zip((attention, mlp), names, strict=True):
        x = hidden if before is None else hidden_norm(hidden, before)
        out = sublayer(x)
        out = out if after is None else hidden_norm(out, after)
        hidden = hidden + layer.residual_multiplier * out
    return hidden


def computed(layer: LayerConfig, w: dict[str, torch.Tensor], hidden: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    context = layer_context(torch.float32, tp)
    module = decoder_layer(layer, HIDDEN, context.within(TOKENS))
    for part in (part for one in module.modules() if isinstance(one, WeightedLayer) for part in one.weight_parts()):
        values = w[part.name].narrow(part.dim, part.start, part.target.shape[part.dim])
        if part.row_order is not None:
            values = values.unflatten(0, (-1, len(part.row_order)))[:, list(part.row_order)].flatten(0, 1)
        part.target.data.copy_(values + part.add)
    module.derive_weights()
    a = layer.mixer
    spec = one_group(
        num_q_heads=HEADS // tp.size, num_kv_heads=max(1, KV_HEADS // tp.size), head_dim=DIM, page_size=8,
        max_seq_len=32, max_rows=1, window=a.window, scale=a.scale, soft_cap=a.soft_cap, sinks=a.sinks,
    )  # fmt: skip
    pool, pair = make_pool(spec, 4), create_attention("torch", "torch", spec)
    module.mixer.bind(spec, pool, count())
    lengths, starts, rows = (np.array(one, dtype=np.int32) for one in ([TOKENS], [0, TOKENS], [0]))
    prefill = PrefillInputs(
        cu_seqlens_q=torch.from_numpy(starts), kv_lens=torch.from_numpy(lengths), rows=torch.from_numpy(rows),
        page_table=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), cu_seqlens_q_host=starts, kv_lens_host=lengths,
        rows_host=rows,
    )  # fmt: skip
    ctx = ForwardContext(slots=(torch.arange(8, 8 + TOKENS),), attention=StepAttention(pair, pair.plan(prefill, None)))
    with torch.inference_mode():
        after = module((Residual(hidden.clone(), tp),), ModelInput(torch.zeros(TOKENS), torch.arange(TOKENS)), ctx)
        last = RMSNorm(HIDDEN, NormConfig(eps=0.0), "last", context)
        last.weight.data.fill_(1.0)
        residual, _ = join(after).settled(last)
        return residual.before_gemm(last)[1]


def weights(layer: LayerConfig) -> dict[str, torch.Tensor]:
    """Random ones for everything that any of these layers has."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * scale

    a, size = layer.mixer, layer.mlp.intermediate_size
    q, kv, over = HEADS * DIM, KV_HEADS * DIM, isinstance(a, NormOverHeadsAttentionConfig)
    found = {
        "self_attn.q_proj.weight": random(q, HIDDEN), "self_attn.k_proj.weight": random(kv, HIDDEN),
        "self_attn.v_proj.weight": random(kv, HIDDEN), "self_attn.o_proj.weight": random(HIDDEN, q),
        "self_attn.q_norm.weight": random(q if over else DIM) + 1, "self_attn.sinks": random(HEADS, scale=2.0),
        "self_attn.k_norm.weight": random(kv if over else DIM) + 1,
        "mlp.gate_proj.weight": random(size, HIDDEN), "mlp.up_proj.weight": random(size, HIDDEN),
        "mlp.down_proj.weight": random(HIDDEN, size),
    }  # fmt: skip
    if a.qkv_bias:
        found |= {f"self_attn.{name}_proj.bias": random(len(found[f"self_attn.{name}_proj.weight"])) for name in "qkv"}
    if a.output_bias:
        found["self_attn.o_proj.bias"] = random(HIDDEN)
    if layer.mlp.bias:
        found |= {f"mlp.{name}_proj.bias": random(size) for name in ("gate", "up")} | {
            "mlp.down_proj.bias": random(HIDDEN)
        }
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found |= {f"{name}_layernorm.weight": random(HIDDEN) + 1 for name in names}
    return found | {f"{name}_layernorm.bias": random(HIDDEN) for name in names}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_its_description_says(name: str, size: int) -> None:
    layer = LAYERS[name]
    w, hidden = weights(layer), torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = reference(layer, w, hidden)
    if size == 1:
        found = [computed(layer, w, hidden, TensorParallel.single())]
    else:
        found = on_ranks(size, lambda tp: computed(layer, w, hidden, tp))
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


def test_offsets_are_added_in_float32() -> None:
    """In bfloat16 1 + 0.001 is 1."""
    context = layer_context(torch.bfloat16, TensorParallel.single())
    layer = RMSNorm(HIDDEN, NormConfig(eps=EPS, weight_offset=1.0), "norm", context)
    (part,) = layer.weight_parts()
    part.target.data.copy_(torch.full((HIDDEN,), 0.001).bfloat16())
    part.target.data.add_(part.add)  # as the loader does
    assert layer.weight.dtype == torch.float32
    x = torch.randn(3, HIDDEN).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    assert 1.0005 < layer.weight[0] < 1.0015


def test_an_output_is_never_dropped() -> None:
    """One that the next norm is to sum over the ranks, where no norm follows."""
    residual = Residual(torch.zeros(2, 4), TensorParallel.single(), _output=torch.ones(2, 4))
    for read in (residual.settled, residual.before_gemm):
        with pytest.raises(RuntimeError, match="there is none"):
            read(None)
