"""Every attention backend of this GPU against the `torch` backend, eager and captured.

Over head sizes, query heads a KV head, page sizes, ragged batches, cached prefixes and chunk boundaries.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.registry import create_attention, import_failure
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV
from tests.specs import one_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ["fa", "fi", "trtllm", "triton"]
SHAPES = [(16, 8, 128), (8, 4, 64), (40, 8, 128)]


def make_spec(name: str, page_size: int, shape: tuple[int, int, int]) -> AttentionSpec:
    entry = BACKENDS[name]
    reason = import_failure(entry.library.package) if entry.library.package else None
    if reason is not None:
        pytest.skip(f"{entry.library.package} is not installed: {reason}")
    if entry.page_sizes is not None and page_size not in entry.page_sizes:
        pytest.skip(f"{name} does not serve page size {page_size}")
    heads, kv_heads, head_dim = shape
    return one_group(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, max_seq_len=4096,
        max_rows=33, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


class Cache:
    """A random pool and a page table with shuffled pages for the given lengths; row order is shuffled too."""

    def __init__(self, spec: AttentionSpec, kv_lens: list[int]) -> None:
        pages = [-(-length // spec.page_size) for length in kv_lens]
        group = spec.groups[0]
        shape = (sum(pages) + 1, group.num_kv_heads, spec.page_size, group.head_dim)
        self.kv = LayerKV(*(torch.randn(shape, device="cuda").to(spec.dtype) for _ in range(2)))
        ids = torch.randperm(sum(pages), device="cuda").int() + 1
        self.table = torch.zeros(spec.max_rows, spec.max_pages_per_row, dtype=torch.int32, device="cuda")
        self.rows_host = np.random.default_rng(0).permutation(spec.max_rows - 1)[: len(kv_lens)].astype(np.int32)
        first = 0
        for row, count in zip(self.rows_host, pages, strict=True):
            self.table[int(row), :count] = ids[first : first + count]
            first += count
        self.kv_lens_host = np.array(kv_lens, dtype=np.int32)

    def prefill_inputs(self, q_lens: list[int]) -> PrefillInputs:
        cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        return PrefillInputs(
            cu_seqlens_q=torch.from_numpy(cu).cuda(), kv_lens=torch.from_numpy(self.kv_lens_host).cuda(),
            rows=torch.from_numpy(self.rows_host).cuda(), page_table=self.table, cu_seqlens_q_host=cu,
            kv_lens_host=self.kv_lens_host, rows_host=self.rows_host,
        )  # fmt: skip

    def decode_inputs(self) -> DecodeInputs:
        return DecodeInputs(
            kv_lens=torch.from_numpy(self.kv_lens_host).cuda(), rows=torch.from_numpy(self.rows_host).cuda(),
            page_table=self.table, kv_lens_host=self.kv_lens_host, rows_host=self.rows_host,
        )  # fmt: skip


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.float() - ref.float()).norm() / ref.float().norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_prefill(name, page_size, shape):
    if BACKENDS[name].prefill_capability > 10 * torch.cuda.get_device_capability()[0]:
        pytest.skip(f"{name} has no prefill on this GPU")
    spec = make_spec(name, page_size, shape)
    torch.manual_seed(page_size)
    backend, reference = (create_attention(n, n, spec) for n in (name, "torch"))
    for q_lens, kv_lens in [
        ([7], [7]),
        ([1, 700, 33, 64], [400, 1000, 33, 3000]),
        ([128] * 8, [128 + 64 * i for i in range(8)]),
    ]:
        cache = Cache(spec, kv_lens)
        inputs = cache.prefill_inputs(q_lens)
        q = torch.randn(sum(q_lens), shape[0], shape[2], device="cuda").to(spec.dtype)
        out, ref = (h.attend(h.spec.layer(0, cache.kv), q, h.plan(inputs, None)) for h in (backend, reference))
        assert error(out, ref) < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_decode_eager_and_captured(name, page_size, shape):
    spec = make_spec(name, page_size, shape)
    torch.manual_seed(page_size)
    prefill = name if BACKENDS[name].prefill_capability <= 10 * torch.cuda.get_device_capability()[0] else "torch"
    backend, reference = create_attention(prefill, name, spec), create_attention("torch", "torch", spec)
    backend.allocate_graph(32)
    for kv_lens in ([1], [1, 63, 64, 65, 1000, 517, 3000, 2], [100 * i + 1 for i in range(32)]):
        cache = Cache(spec, kv_lens)
        inputs = cache.decode_inputs()
        q = torch.randn(len(kv_lens), shape[0], shape[2], device="cuda").to(spec.dtype)
        ref = reference.attend(reference.spec.layer(0, cache.kv), q, reference.plan(None, inputs))
        assert error(backend.attend(backend.spec.layer(0, cache.kv), q, backend.plan(None, inputs)), ref) < 1e-2
        plan = backend.plan_capture(inputs)
        backend.attend(backend.spec.layer(0, cache.kv), q, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.attend(backend.spec.layer(0, cache.kv), q, plan)
        backend.plan_replay(inputs)
        graph.replay()
        assert error(out, ref) < 1e-2


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rotating_decode_eager_and_captured(page_size, shape, normed):
    spec = make_spec("triton", page_size, shape)
    heads, kv_heads, dim = shape
    torch.manual_seed(page_size)
    backend, reference = create_attention("triton", "triton", spec), create_attention("torch", "torch", spec)
    angles = torch.randn(spec.max_seq_len, dim // 2, device="cuda")
    norms = [torch.randn(dim, device="cuda").bfloat16() if normed else None for _ in range(2)]
    rotation = QKNormRope(
        q_norm=norms[0], k_norm=norms[1], cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1), eps=1e-6
    )
    for kv_lens in ([1], [1, 63, 64, 65, 1000, 517, 3000, 2], [100 * i + 1 for i in range(32)]):
        cache = Cache(spec, kv_lens)
        inputs = cache.decode_inputs()
        positions = inputs.kv_lens - 1
        slots = cache.table[inputs.rows, positions // page_size] * page_size + positions % page_size
        qkv = torch.randn(len(kv_lens), (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
        k, v = cache.kv.k.clone(), cache.kv.v.clone()
        q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(k, v), heads)
        ref = reference.attend(reference.spec.layer(0, LayerKV(k, v)), q, reference.plan(None, inputs))
        plan = backend.plan_capture(inputs)
        assert error(backend.attend_with_rope(backend.spec.layer(0, cache.kv), qkv, rotation, plan), ref) < 1e-2
        assert error(cache.kv.k, k) < 1e-2
        torch.testing.assert_close(cache.kv.v, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.attend_with_rope(backend.spec.layer(0, cache.kv), qkv, rotation, plan)
        for _ in range(3):
            graph.replay()
        assert error(out, ref) < 1e-2
