"""A whole decode step without an engine around it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import profile_step, random_weights, time_graph
from minisgl_backend.kernels.attention.calls import CachedLayer
from minisgl_backend.kernels.attention.choose import decode_shape, rotation_pays
from minisgl_backend.kernels.attention.decode import (
    DecodeBatch,
    DecodeWorkspace,
    decode_attention,
    rotating_decode_attention,
)
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import LARGEST_OUT
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.sampling.launch import SamplingKernels
from minisgl_backend.kernels.triton_ops import TritonOps
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.request import SamplingParams
from minisgl_backend.sampling.params import encode_params


class PolicyKernels(PlainKernels):
    """With another rule for which GEMMs take the small kernels: "rule" is that of choose.py."""

    def __init__(self, policy: str, pdl: bool) -> None:
        device = torch.device("cuda")
        facts = dataclasses.replace(DeviceFacts.of(device), dependent_launch=pdl)
        super().__init__(GemmDevice(TritonOps(device, ChainShape.hidden, facts), device))
        small, cublas = map(self.chooser.by_name, ("small_rows", "torch"))
        if policy == "cublas":
            self.chooser.run = lambda key: cublas
        elif policy == "all":
            self.chooser.run = lambda key: small if key.size_out <= LARGEST_OUT else cublas


@dataclass(frozen=True)
class ChainShape:
    """One decoder, Qwen3-0.6B unless told otherwise."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    size: int = 3072
    layers: int = 28
    vocab: int = 151936
    page: int = 64
    context: int = 1024


class Chain:
    """All tensors of a decode step at one batch size."""

    def __init__(self, shape: ChainShape, batch: int) -> None:
        self.shape, self.batch, device = shape, batch, torch.device("cuda")
        pages_each = shape.context // shape.page + 1
        qkv, attended = (shape.heads + 2 * shape.kv_heads) * shape.dim, shape.heads * shape.dim
        self.stack = [
            (
                random_weights(qkv, shape.hidden),
                random_weights(shape.hidden, attended),
                random_weights(2 * shape.size, shape.hidden),
                random_weights(shape.hidden, shape.size),
            )
            for _ in range(shape.layers)
        ]
        self.norm, self.head_norm = random_weights(shape.hidden), random_weights(shape.dim)
        self.lm_head = random_weights(shape.vocab, shape.hidden)
        self.cos_sin = torch.randn(4 * shape.context, shape.dim, device=device)
        pool = (shape.layers, 2, batch * pages_each + 1, shape.kv_heads, shape.page, shape.dim)
        self.pool = torch.randn(pool, device=device, dtype=torch.bfloat16)
        self.table = (torch.randperm(batch * pages_each, device=device) + 1).int().reshape(batch, pages_each)
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.lengths = torch.full((batch,), shape.context, dtype=torch.int32, device=device)
        self.positions = self.lengths - 1
        last = shape.context - 1
        self.slots = self.table[:, last // shape.page] * shape.page + last % shape.page
        self.x = torch.randn(batch, shape.hidden, device=device).bfloat16()
        self.attention = DecodeWorkspace(max(batch, 64), shape.heads, shape.kv_heads, shape.dim, device)
        # Without programmatic dependent launch and with it.
        self.sampling = [SamplingKernels(batch, shape.vocab, device, pdl=pdl) for pdl in (False, True)]
        line = torch.from_numpy(encode_params(SamplingParams(temperature=0.6, seed=1), shape.vocab).copy())
        self.params = line.repeat(batch, 1).to(device)

    def step(self, plain: PlainKernels) -> torch.Tensor:
        """The sampled tokens."""
        ops = plain.ops
        pdl = plain.device.pdl(self.x)
        cut = decode_shape(self.batch, self.shape.kv_heads, self.shape.heads // self.shape.kv_heads)
        where = DecodeBatch(self.rows, self.lengths, self.table, self.attention, cut, pdl)
        x = self.x.clone()  # GEMMs add to the residual in place
        for layer, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(self.stack):
            k, v = self.pool[layer]
            qkv = plain.linear(x, qkv_weight, GemmCall(self.norm, 1e-6))
            norm, scale = self.head_norm, self.shape.dim**-0.5
            kept = CachedLayer(kv=LayerKV(k, v), scale=scale)
            rotation = QKNormRope(q_norm=norm, k_norm=norm, cos_sin=self.cos_sin, eps=1e-6)
            if rotation_pays(self.batch, self.shape.kv_heads):
                attended = rotating_decode_attention(qkv, rotation, kept, where)
            else:
                q = ops.rope_store(
                    qkv, rotation, TokenPlaces(self.positions, self.slots), LayerKV(k, v), self.shape.heads
                )
                attended = decode_attention(q, kept, where)
            x = plain.linear(attended.flatten(1), o_weight, GemmCall(residual=x))
            gated = plain.linear(x, gate_up_weight, GemmCall(self.norm, 1e-6, activation="silu"))
            x = plain.linear(gated, down_weight, GemmCall(residual=x))
        logits = plain.linear(ops.rms_norm(x, self.norm, 1e-6), self.lm_head)
        return self.sampling[pdl].sample_plain(logits, self.rows, self.positions, self.params)


def bench_chain(results: dict[str, dict], profile: bool) -> None:
    """A whole decode step of Qwen3-0.6B shapes, attention and sampling included, as one graph; no engine around it."""
    for batch in (1, 2, 8, 64, 256):
        chain = Chain(ChainShape(), batch)
        for policy, pdl in (("cublas", False), ("rule", False), ("rule", True), ("all", True)):
            if policy == "all" and batch > 64:
                continue
            step = functools.partial(chain.step, PolicyKernels(policy, pdl))
            us = time_graph([step])
            key = f"chain 0.6B batch {batch} {policy} pdl {int(pdl)}"
            results[key] = {"ms": round(us / 1000, 3)}
            print(f"{key}: {us / 1000:.3f} ms", flush=True)
            if profile and policy == "rule" and pdl:
                profile_step(step)
        del chain, step
        torch.cuda.empty_cache()
