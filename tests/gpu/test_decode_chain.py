"""Kernels that start before the one ahead has ended, as in a decode step: a captured chain of two layers.

Each kernel alone may be right and the chain wrong: one that reads too early sees the step before, or another layer. So
lengths and pages change between replays, and every replay must say what the same kernels say one after the other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, INNER, LAYERS, PAGE, MOST = 512, 768, 2, 16, 40  # the last: pages of a sequence
EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int

    @property
    def size(self) -> int:
        return (self.q + 2 * self.kv) * self.dim


class Step:
    """What a step reads beside the weights; fixed places, as graphs need them."""

    def __init__(self, batch: int, heads: Heads, dtype: torch.dtype) -> None:
        self.hidden = torch.zeros(batch, HIDDEN, device="cuda", dtype=dtype)
        self.rows = torch.randperm(batch + 3, device="cuda")[:batch].int()
        self.kv_lens = torch.zeros(batch, device="cuda", dtype=torch.int32)
        self.table = torch.zeros(batch + 3, MOST, device="cuda", dtype=torch.int32)
        shape = (LAYERS, 2, batch * MOST + 1, heads.kv, PAGE, heads.dim)
        self.cache = torch.randn(shape, device="cuda").to(dtype)

    def change(self) -> None:
        """Other tokens, other lengths, other pages."""
        batch = len(self.rows)
        self.hidden.normal_()
        self.kv_lens.copy_(torch.randint(1, MOST * PAGE, (batch,), device="cuda"))
        self.table[self.rows.long()] = (torch.randperm(batch * MOST, device="cuda") + 1).int().reshape(batch, MOST)


class Layers:
    """Random weights, and the chain over them. Nothing in it starts early with `pdl=False`."""

    def __init__(self, heads: Heads, dtype: torch.dtype, batch: int, *, pdl: bool) -> None:
        from minisgl_backend.kernels.attention.decode import DecodeWorkspace
        from minisgl_backend.kernels.device_facts import DeviceFacts
        from minisgl_backend.kernels.triton_ops import TritonOps

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, device="cuda") / columns**0.5).to(dtype)

        torch.manual_seed(1)
        device = torch.device("cuda")
        self.heads, self.pdl = heads, pdl
        facts = dataclasses.replace(DeviceFacts.of(device), dependent_launch=pdl)
        self.plain = PlainKernels(GemmDevice(TritonOps(device, facts=facts), device))
        self.workspace = DecodeWorkspace(batch + 3, heads.q, heads.kv, heads.dim, device)
        sizes = ((heads.size, HIDDEN), (HIDDEN, heads.q * heads.dim), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.weights = [[weight(*size) for size in sizes] for _ in range(LAYERS)]
        self.norms = [torch.randn(HIDDEN, device="cuda").to(dtype) for _ in range(2)]
        self.head_norms = [torch.randn(heads.dim, device="cuda").to(dtype) for _ in range(2)]
        angles = torch.randn(MOST * PAGE, heads.dim // 2, device="cuda")
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

    def run(self, step: Step) -> torch.Tensor:
        from minisgl_backend.kernels.attention.calls import CachedLayer
        from minisgl_backend.kernels.attention.choose import decode_shape
        from minisgl_backend.kernels.attention.decode import DecodeBatch, rotating_decode_attention
        from minisgl_backend.kernels.ops import QKNormRope
        from minisgl_backend.kv.layout import LayerKV

        shape = decode_shape(len(step.rows), self.heads.kv, self.heads.q // self.heads.kv, 132)
        batch = DecodeBatch(step.rows, step.kv_lens, step.table, self.workspace, shape, self.pdl)
        q_norm, k_norm = self.head_norms
        rotation = QKNormRope(q_norm=q_norm, k_norm=k_norm, cos_sin=self.cos_sin, eps=EPS)
        hidden = step.hidden.clone()
        for layer, (qkv_weight, o_weight, gate_up, down) in enumerate(self.weights):
            qkv = self.plain.linear(hidden, qkv_weight, GemmCall(self.norms[0], EPS))
            kept = CachedLayer(kv=LayerKV(*step.cache[layer]), scale=self.heads.dim**-0.5)
            attended = rotating_decode_attention(qkv, rotation, kept, batch)
            hidden = self.plain.linear(attended.flatten(1), o_weight, GemmCall(residual=hidden))
            inner = self.plain.linear(hidden, gate_up, GemmCall(self.norms[1], EPS, activation="silu"))
            hidden = self.plain.linear(inner, down, GemmCall(residual=hidden))
        return hidden


def worst_row(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest relative error of any row: a stale read may harm only one."""
    out, ref = out.double().flatten(0, -2), ref.double().flatten(0, -2)
    return ((out - ref).norm(dim=1) / ref.norm(dim=1)).max().item()


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(16, 8, 128), torch.bfloat16),
        (Heads(8, 2, 80), torch.bfloat16),
        (Heads(12, 4, 96), torch.float16),
        (Heads(8, 8, 64), torch.float32),
        (Heads(4, 1, 256), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 8, 33])
def test_captured_chain_says_what_the_kernels_say_one_after_the_other(batch, heads, dtype):
    torch.manual_seed(batch)
    step = Step(batch, heads, dtype)
    early, late = (Layers(heads, dtype, batch, pdl=pdl) for pdl in (True, False))
    step.change()
    early.run(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = early.run(step)
    for _ in range(10):
        step.change()
        before = step.cache.clone()
        graph.replay()
        found, cache = out.clone(), step.cache.clone()
        step.cache.copy_(before)
        expected = late.run(step)
        assert worst_row(found, expected) < (1e-4 if dtype == torch.float32 else 2e-2)
        assert worst_row(cache, step.cache) < (1e-4 if dtype == torch.float32 else 2e-2)
