"""Soft caps, sinks, head sizes, activations and norms after a sublayer, compiled, against plain torch in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.needs import AttentionNeeds, Scores
from minisgl_backend.attention.registry import create_attention, import_failure
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import MixtureCall
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV
from tests.gpu.test_attention_backends import Cache, error
from tests.mixtures import by_gpu, by_torch, experts_of
from tests.specs import one_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, KV_HEADS, PAGE = 16, 8, 64
# head size, soft cap, sinks, window: Gemma 2, gpt-oss, and head sizes that are no power of two
CASES = [
    (256, 50.0, False, None),
    (128, 2.0, False, 100),
    (64, None, True, 128),
    (64, None, True, None),
    (80, None, False, None),
    (96, 30.0, True, None),
    (192, None, False, None),
]


@pytest.mark.parametrize(("dim", "soft_cap", "sinks", "window"), CASES)
@pytest.mark.parametrize("name", ["triton", "fa", "fi"])
def test_attention(name: str, dim: int, soft_cap: float | None, sinks: bool, window: int | None) -> None:
    entry, scores = BACKENDS[name], Scores(soft_cap is not None, sinks)
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    refusal = entry.refusal(AttentionNeeds(compute_capability=capability, head_dims=(dim,), scores=scores))
    packages = [entry.library.package, entry.library.kernels, entry.sink_kernels if sinks else ""]
    missing = [reason for package in packages if package and (reason := import_failure(package)) is not None]
    if refusal or missing:
        pytest.skip(f"{name} {refusal or missing[0]}")
    torch.manual_seed(dim)
    specs = [
        one_group(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, page_size=PAGE, max_seq_len=4096, max_rows=33,
            dtype=dtype, device="cuda", window=window, scale=0.1, soft_cap=soft_cap, sinks=sinks,
        )
        for dtype in (torch.bfloat16, torch.float32)
    ]  # fmt: skip
    backend, reference = create_attention(name, name, specs[0]), create_attention("torch", "torch", specs[1])
    weights = torch.randn(HEADS, device="cuda") * 3 if sinks else None
    for kv_lens in ([1], [1, 63, 64, 65, 1000, 517, 3000, 2], [100 * i + 1 for i in range(32)]):
        cache = Cache(specs[0], kv_lens)
        layer = specs[0].layer(0, cache.kv, weights)
        exact = specs[1].layer(0, LayerKV(cache.kv.k.float(), cache.kv.v.float()), weights)
        decode = cache.decode_inputs()
        q = torch.randn(len(kv_lens), HEADS, dim, device="cuda").bfloat16()
        expected = reference.attend(exact, q.float(), reference.plan(None, decode))
        assert error(backend.attend(layer, q, backend.plan(None, decode)), expected) < 1e-2
        q_lens = [max(1, length // 2) for length in kv_lens]
        prefill = cache.prefill_inputs(q_lens)
        q = torch.randn(sum(q_lens), HEADS, dim, device="cuda").bfloat16()
        expected = reference.attend(exact, q.float(), reference.plan(prefill, None))
        assert error(backend.attend(layer, q, backend.plan(prefill, None)), expected) < 1e-2


@pytest.mark.parametrize(("dim", "soft_cap", "sinks", "window"), CASES)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_decode_with_rope(batch: int, dim: int, soft_cap: float | None, sinks: bool, window: int | None) -> None:
    spec = one_group(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, page_size=PAGE, max_seq_len=4096, max_rows=33,
        dtype=torch.bfloat16, device="cuda", window=window, scale=0.1, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
    torch.manual_seed(dim)
    backend, reference = create_attention("triton", "triton", spec), create_attention("torch", "torch", spec)
    weights = torch.randn(HEADS, device="cuda") * 3 if sinks else None
    cache = Cache(spec, [100 * i + 1 for i in range(batch)])
    inputs = cache.decode_inputs()
    angles = torch.randn(4096, dim // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norms = [torch.rand(dim, device="cuda") + 0.5 for _ in range(2)]  # float32, as those with an offset are
    rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6)
    positions = inputs.kv_lens - 1
    slots = cache.table[inputs.rows, positions // PAGE] * PAGE + positions % PAGE
    qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * dim, device="cuda").bfloat16()
    stored = LayerKV(cache.kv.k.clone(), cache.kv.v.clone())
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), stored, HEADS)
    expected = reference.attend(spec.layer(0, stored, weights), q, reference.plan(None, inputs))
    layer = spec.layer(0, cache.kv, weights)
    assert error(backend.attend_with_rope(layer, qkv, rotation, backend.plan(None, inputs)), expected) < 1e-2
    assert error(cache.kv.k, stored.k) < 1e-2


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 4, 30, 200])
def test_activations(rows: int, activation: str) -> None:
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    ops = PlainKernels(GemmDevice(TritonOps(device), device))
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    weight, norm = torch.randn(2 * 3072, 1024, device="cuda").bfloat16() / 32, torch.rand(1024, device="cuda") + 0.5
    found = ops.linear(x, weight, GemmCall(norm, 1e-6, activation=activation))
    expected = PlainKernels(GemmDevice(TorchOps())).linear(
        x.float(), weight.float(), GemmCall(norm, 1e-6, activation=activation)
    )
    assert error(found, expected) < 1e-2
    if rows <= 64:
        router = torch.randn(8, 1024, device="cuda").bfloat16()
        gate_up = torch.randn(8, 512, 1024, device="cuda").bfloat16() / 32
        down = torch.randn(8, 1024, 256, device="cuda").bfloat16() / 16
        experts = experts_of(gate_up, down, 2, activation=activation)
        found = by_gpu(x, experts, MixtureCall(router=router))
        experts = replace(experts, gate_up=gate_up.float(), down=down.float())
        assert error(found, by_torch(x.float(), experts, MixtureCall(router=router.float()))) < 3e-2


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_that_are_added(rows: int, dtype: torch.dtype) -> None:
    from minisgl_backend.kernels.triton_ops import TritonOps

    hidden, x = (torch.randn(rows, 2304, device="cuda").bfloat16() for _ in range(2))
    weight = (torch.randn(2304, device="cuda") + 1).to(dtype)
    expected = hidden.float() + 0.5 * F.rms_norm(x.float(), (2304,), weight.float(), 1e-6)
    assert error(TritonOps(torch.device("cuda")).add_norm(hidden, x, weight, 1e-6, 0.5), expected) < 5e-3
