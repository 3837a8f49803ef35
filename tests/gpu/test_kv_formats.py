"""An FP8 KV cache on every attention backend: what is stored, what is read, and whether the demo model still answers.

python -m benchmarks.kernels --only kv8 measures the bandwidth.
"""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.needs import AttentionNeeds
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from tests.gpu.test_attention_backends import Cache, error
from tests.gpu.test_windows_on_gpu import skip_what_is_not_here
from tests.specs import one_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 numbers"
    ),
]

SCALES = KVScales(0.03, 0.01)
# Beside the rounding of a cache, which both sides share: fa multiplies FP8 queries and FP8 weights of the values too,
# and trtllm rounds within windows (2.2e-2; a window that is off by one would be 1e-1).
TOLERANCES = {"triton": 1e-2, "fi": 1e-2, "trtllm": 3e-2, "fa": 9e-2, "torch": 1e-2}


def make_spec(
    heads: int, kv_heads: int, dim: int, page_size: int, kv_dtype: torch.dtype, window: int = 0
) -> AttentionSpec:
    return one_group(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page_size, max_seq_len=4096, max_rows=33,
        dtype=torch.bfloat16, device="cuda", kv_dtype=kv_dtype, window=window or None,
    )  # fmt: skip


def quantized(cache: Cache) -> tuple[LayerKV, LayerKV]:
    """A cache in FP8, and what its numbers mean, in float32."""
    most = torch.finfo(FP8).max  # torch makes NaN of what is more
    k, v = (
        (one.float() / scale).clamp(-most, most).to(FP8)
        for one, scale in ((cache.kv.k, SCALES.k), (cache.kv.v, SCALES.v))
    )
    return LayerKV(k, v, SCALES), LayerKV(k.float() * SCALES.k, v.float() * SCALES.v)


@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("normed", [True, False])
def test_what_is_stored(rows: int, normed: bool) -> None:
    """The same bytes as torch's conversion, but for norms and angles that differ in their last bit; NaN stays one."""
    from minisgl_backend.kernels.triton_ops import TritonOps

    torch.manual_seed(rows)
    heads, kv_heads, dim, page_size = 8, 4, 128, 16
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
    qkv[1] *= 1000
    qkv[2, -5] = torch.nan
    norms = [torch.randn(dim, device="cuda").bfloat16() if normed else None for _ in range(2)]
    cos_sin = torch.randn(600, dim, device="cuda")
    positions = torch.randint(0, 600, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(rows * 2, device="cuda")[:rows].int()
    pools = []
    for ops in (TritonOps(torch.device("cuda")), TorchOps()):
        pool = torch.zeros(2, rows * 2 // page_size + 1, kv_heads, page_size, dim, device="cuda").to(FP8)
        rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6)
        ops.rope_store(
            qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(pool[0], pool[1], KVScales(0.5, 0.25)), heads
        )
        pools.append(pool)
    found, expected = (pool.float() for pool in pools)
    assert torch.equal(found.isnan(), expected.isnan())
    assert int(found.isnan().sum()) == 1
    assert found.nan_to_num().abs().max() == 448
    assert (found != expected).float().mean() < 2e-3 + 1 / found.numel()
    assert error(found.nan_to_num(), expected.nan_to_num()) < 5e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (8, 2, 64), (40, 8, 128)])
@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 100), (64, 0)])
@pytest.mark.parametrize("name", ["triton", "fi", "trtllm", "fa", "torch"])
def test_every_backend(name: str, page_size: int, window: int, heads: int, kv_heads: int, dim: int) -> None:
    skip_what_is_not_here(name)
    if BACKENDS[name].page_sizes is not None and page_size not in BACKENDS[name].page_sizes:
        pytest.skip(f"{name} does not serve page size {page_size}")
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    needs = AttentionNeeds(compute_capability=capability, head_dims=(dim,), kv_dtype="float8_e4m3fn")
    if BACKENDS[name].refusal(needs) is not None:
        pytest.skip(f"{name} reads no FP8 cache on this GPU")
    torch.manual_seed(page_size)
    spec = make_spec(heads, kv_heads, dim, page_size, FP8, window)
    plain = one_group(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page_size, max_seq_len=4096, max_rows=33,
        dtype=torch.float32, device="cuda", window=window or None,
    )  # fmt: skip
    capable = BACKENDS[name].prefill_capability <= capability
    backend, reference = (
        create_attention(name if capable else "torch", name, spec),
        create_attention("torch", "torch", plain),
    )
    captured = backend.supports_graphs
    if captured:
        backend.allocate_graph(32)
    for kv_lens in ([1], [1, 63, 64, 65, 1000, 517, 3000, 2], [100 * i + 1 for i in range(32)]):
        cache = Cache(make_spec(heads, kv_heads, dim, page_size, torch.bfloat16), kv_lens)
        kv, meant = quantized(cache)
        inputs = cache.decode_inputs()
        q = torch.randn(len(kv_lens), heads, dim, device="cuda").bfloat16()
        ref = reference.attend(reference.spec.layer(0, meant), q.float(), reference.plan(None, inputs))
        assert error(backend.attend(backend.spec.layer(0, kv), q, backend.plan(None, inputs)), ref) < TOLERANCES[name]
        if captured:
            plan = backend.plan_capture(inputs)
            backend.attend(backend.spec.layer(0, kv), q, plan)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = backend.attend(backend.spec.layer(0, kv), q, plan)
            backend.plan_replay(inputs)
            graph.replay()
            assert error(out, ref) < TOLERANCES[name]
        if capable:
            q_lens = [max(1, length // 2) for length in kv_lens]
            prefill = cache.prefill_inputs(q_lens)
            q = torch.randn(sum(q_lens), heads, dim, device="cuda").bfloat16()
            ref = reference.attend(reference.spec.layer(0, meant), q.float(), reference.plan(prefill, None))
            assert (
                error(backend.attend(backend.spec.layer(0, kv), q, backend.plan(prefill, None)), ref) < TOLERANCES[name]
            )


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("page_size", [1, 64])
def test_rotating_decode(page_size: int, batch: int) -> None:
    """The new token is attended to as it is stored."""
    skip_what_is_not_here("triton")
    heads, kv_heads, dim = 16, 8, 128
    torch.manual_seed(batch)
    backend = create_attention("triton", "triton", make_spec(heads, kv_heads, dim, page_size, FP8))
    angles = torch.randn(4096, dim // 2, device="cuda")
    norms = [torch.randn(dim, device="cuda").bfloat16() for _ in range(2)]
    rotation = QKNormRope(
        q_norm=norms[0], k_norm=norms[1], cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1), eps=1e-6
    )
    cache = Cache(make_spec(heads, kv_heads, dim, page_size, torch.bfloat16), [100 * i + 1 for i in range(batch)])
    kv, _ = quantized(cache)
    inputs = cache.decode_inputs()
    positions = inputs.kv_lens - 1
    slots = cache.table[inputs.rows, positions // page_size] * page_size + positions % page_size
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
    stored = LayerKV(kv.k.clone(), kv.v.clone(), SCALES)
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), stored, heads)
    plan = backend.plan_capture(inputs)
    out = backend.attend_with_rope(backend.spec.layer(0, kv), qkv, rotation, plan)
    assert (kv.k.float() != stored.k.float()).float().mean() < 1e-3
    assert torch.equal(kv.v.view(torch.uint8), stored.v.view(torch.uint8))
    reference = create_attention("torch", "torch", make_spec(heads, kv_heads, dim, page_size, torch.bfloat16))
    meant = LayerKV((kv.k.float() * SCALES.k).bfloat16(), (kv.v.float() * SCALES.v).bfloat16())
    assert error(out, reference.attend(reference.spec.layer(0, meant), q, reference.plan(None, inputs))) < 2e-2


@pytest.mark.parametrize("names", ["triton", "fi", "fa", "fa,trtllm"])
def test_the_demo_model_answers(names: str) -> None:
    """A short gauge with graphs and pieces; benchmarks.gauge asks 500 questions a kind."""
    skip_what_is_not_here(names)
    from minisgl_backend import LLM
    from tests.gauge.harness import GREEDY, short_questions

    asked = short_questions(15)
    options = {"dtype": "bfloat16", "max_running_requests": 32, "max_seq_len_override": 2048, "num_pages": 2048}
    with LLM("demo", attention_backend=names, kv_cache_dtype="fp8_e4m3", **options) as llm:
        outputs = llm.chat([question.messages for question in asked], GREEDY)
    right = sum(question.is_right(output.text) for question, output in zip(asked, outputs, strict=True))
    assert right >= 0.95 * len(asked), f"{right} of {len(asked)}"


def test_twice_the_tokens_fit() -> None:
    from tests.gpu.test_runner import make_runner

    pages = []
    for format_name in ("auto", "fp8_e4m3"):
        torch.cuda.empty_cache()
        runner = make_runner(
            memory_ratio=0.05, max_seq_len_override=1024, max_prefill_length=1024, cuda_graph_max_tokens=0,
            kv_cache_dtype=format_name,
        )  # fmt: skip
        pages.append(runner.num_pages)
        runner.close()
        del runner
    assert 1.9 < pages[1] / pages[0] < 2.1
