"""The Triton-language kernels against plain torch on a real GPU, in the number formats that models use."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from tests.mixtures import TORCH, by_torch, experts_of, on_gpu

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def triton_kernels(dependent_launch=True):
    """Of plain weights. dependent_launch: where the device has it."""
    from minisgl_backend.kernels.device_facts import DeviceFacts
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    facts = DeviceFacts.of(device)
    facts = dataclasses.replace(facts, dependent_launch=dependent_launch and facts.dependent_launch)
    return PlainKernels(GemmDevice(TritonOps(device, facts=facts), device))


def chosen_kernel(kernels, x, weight, **more):
    from minisgl_backend.kernels.linear.call import LinearKey

    return kernels.chooser.kernel(LinearKey(len(x), *weight.shape, x.dtype, **more))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(16, 8, 128), (8, 4, 64), (40, 8, 128), (8, 8, 128), (16, 4, 256)])
@pytest.mark.parametrize("lengths", [[1], [400], [1, 63, 64, 65, 1000, 517, 3000, 2], [300] * 256], ids=len)
def test_decode_attention(page_size, heads, lengths):
    from minisgl_backend.kernels.attention.choose import decode_shape
    from tests.attention_cases import PagedCase, check_decode

    case = PagedCase(lengths, page_size, heads, device=torch.device("cuda"), dtype=torch.bfloat16)
    shape = decode_shape(len(lengths), case.kv_heads, case.heads // case.kv_heads, head_dim=heads[2])
    check_decode(case, shape, max_rows=257, launches=3)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_attention(page_size):
    from tests.attention_cases import PagedCase, check_prefill

    heads, kv_lens, device = (16, 8, 128), [5, 1000, 400, 33], torch.device("cuda")
    check_prefill(PagedCase(kv_lens, page_size, heads, device=device, dtype=torch.bfloat16), [5, 700, 1, 33])


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64])
@pytest.mark.parametrize(("size_out", "size_in"), [(4096, 1024), (1024, 3072), (1000, 520)])
def test_small_linear(rows, size_out, size_in):
    from minisgl_backend.kernels.linear.plain.small_rows import linear
    from minisgl_backend.kernels.linear.workspace import LinearWorkspace

    torch.manual_seed(rows)
    workspace = LinearWorkspace(torch.device("cuda"))
    x = torch.randn(rows, size_in, device="cuda").bfloat16()
    weight = torch.randn(size_out, size_in, device="cuda").bfloat16() / math.sqrt(size_in)
    norm = torch.randn(size_in, device="cuda").bfloat16()
    residual = torch.randn(rows, size_out, device="cuda").bfloat16()
    product = x.double() @ weight.double().T
    normed = F.rms_norm(x.double(), (size_in,), norm.double(), 1e-6) @ weight.double().T
    gate, up = normed.chunk(2, 1)
    for _ in range(3):
        assert relative(linear(x, weight, workspace), product) < 5e-3
        assert relative(linear(x, weight, workspace, GemmCall(residual=residual)), product + residual.double()) < 5e-3
        assert relative(linear(x, weight, workspace, GemmCall(norm, 1e-6)), normed) < 6e-3
        gated = linear(x, weight, workspace, GemmCall(norm, 1e-6, activation="silu"))
        assert relative(gated, F.silu(gate) * up) < 8e-3
        assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("rows", "size_out", "size_in"),
    [(1, 4096, 1024), (1, 1024, 3072), (1, 1000, 520), (1, 151936, 1024), (2, 5120, 2560), (2, 1000, 4104)],
)
def test_small_linear_vector(rows, size_out, size_in, pdl):
    from minisgl_backend.kernels.linear.plain.small_rows import linear
    from minisgl_backend.kernels.linear.plain.tiling import linear_shape
    from minisgl_backend.kernels.linear.workspace import LinearWorkspace

    torch.manual_seed(rows)
    workspace = LinearWorkspace(torch.device("cuda"))
    x = torch.randn(rows, size_in, device="cuda").bfloat16()
    weight = torch.randn(size_out, size_in, device="cuda").bfloat16() / math.sqrt(size_in)
    norm = torch.randn(size_in, device="cuda").bfloat16()
    residual = torch.randn(rows, size_out, device="cuda").bfloat16()
    normed = F.rms_norm(x.double(), (size_in,), norm.double(), 1e-6) @ weight.double().T
    gate, up = normed.chunk(2, 1)
    out = linear(x, weight, workspace, GemmCall(residual=residual), pdl=pdl)
    assert linear_shape(rows, size_out, size_in).vector
    assert relative(out, x.double() @ weight.double().T + residual.double()) < 5e-3
    assert relative(linear(x, weight, workspace, GemmCall(norm, 1e-6), pdl=pdl), normed) < 6e-3
    gated = linear(x, weight, workspace, GemmCall(norm, 1e-6, activation="silu"), pdl=pdl)
    assert relative(gated, F.silu(gate) * up) < 8e-3


@pytest.mark.parametrize("rows", [3, 8, 16])
@pytest.mark.parametrize(("size_out", "size_in"), [(5120, 5120), (5120, 12800)])
def test_long_products(rows, size_out, size_in):
    """With weights that are on their way before their inputs are."""
    torch.manual_seed(rows)
    ops, norm = triton_kernels(), torch.ones(size_in, device="cuda").bfloat16()
    weight = torch.randn(size_out, size_in, device="cuda").bfloat16() / math.sqrt(size_in)
    assert chosen_kernel(ops, torch.empty(rows, size_in, device="cuda").bfloat16(), weight) == "long_rows"
    for _ in range(20):
        states = torch.randn(rows, size_in, device="cuda").bfloat16()
        x = ops.ops.rms_norm(states, norm, 1e-6)
        found = ops.linear(x, weight)
        assert relative(found, x.double() @ weight.double().T) < 5e-3


@pytest.mark.parametrize("rows", [33, 64])
def test_gated_products_of_many_rows(rows):
    torch.manual_seed(rows)
    ops, x = triton_kernels(), torch.randn(rows, 5120, device="cuda").bfloat16()
    weight = torch.randn(25600, 5120, device="cuda").bfloat16() / 72
    assert chosen_kernel(ops, x, weight, activation="silu") == "small_rows"
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    for _ in range(3):
        assert relative(ops.linear(x, weight, GemmCall(activation="silu")), F.silu(gate) * up) < 8e-3


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
def test_fused_chains_match_torch(rows):
    from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
    from minisgl_backend.kernels.torch_ops import TorchOps
    from minisgl_backend.kernels.triton_ops import TritonOps
    from minisgl_backend.kv.layout import LayerKV

    torch.manual_seed(rows)
    device = torch.device("cuda")
    triton_ops, torch_ops = TritonOps(device), TorchOps()
    plain, torch_plain = PlainKernels(GemmDevice(triton_ops, device)), PlainKernels(GemmDevice(torch_ops))
    heads, kv_heads, dim, page_size = 8, 4, 64, 16
    x = torch.randn(rows, 512, device=device).bfloat16()
    weight = torch.randn(512, device=device).bfloat16()
    assert relative(triton_ops.rms_norm(x, weight, 1e-6), torch_ops.rms_norm(x, weight, 1e-6)) < 4e-3
    gate_up = torch.randn(3000, 512, device=device).bfloat16() * 0.05
    call = GemmCall(weight, 1e-6, activation="silu")
    assert relative(plain.linear(x, gate_up, call), torch_plain.linear(x, gate_up, call)) < 1e-2
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device).bfloat16()
    norms = [torch.randn(dim, device=device).bfloat16() for _ in range(2)]
    cos_sin = torch.randn(4096, dim, device=device)
    positions = torch.randint(0, 4096, (rows,), device=device, dtype=torch.int32)
    slots = torch.randperm(rows * 2, device=device)[:rows].int()
    rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6)
    outputs = []
    for ops in (triton_ops, torch_ops):
        pool = torch.zeros(2, rows * 2 // page_size + 1, kv_heads, page_size, dim, device=device).bfloat16()
        q = ops.rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(pool[0], pool[1]), heads)
        outputs.append((q, pool))
    assert relative(outputs[0][0], outputs[1][0]) < 4e-3
    assert relative(outputs[0][1], outputs[1][1]) < 4e-3


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1000])
def test_moe_matches_torch(tokens, tma, biased):
    """biased: as in gpt-oss, with its activation."""
    from minisgl_backend.kernels.moe import grouped, grouped_tma

    torch.manual_seed(tokens)
    experts, k, hidden, size = 32, 4, 512, 192
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(experts, device="cuda")[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k, device="cuda")
    gate_up = torch.randn(experts, 2 * size, hidden, device="cuda").bfloat16() * 0.05
    down = torch.randn(experts, hidden, size, device="cuda").bfloat16() * 0.05
    biases = (torch.randn(experts, 2 * size, device="cuda").bfloat16(), torch.randn_like(down[..., 0]))
    more = {"activation": "swiglu_oai"} if biased else {}
    picked = Picked(ids, weights)

    def weighted(dtype):
        named = zip(("gate_up_bias", "down_bias"), biases if biased else (), strict=False)
        return experts_of(gate_up.to(dtype), down.to(dtype), **{name: one.to(dtype) for name, one in named}, **more)

    ref = by_torch(x.double(), weighted(torch.float64), MixtureCall(Picked(ids, weights.double())))
    if tma and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs tensor memory access")
    found = (grouped_tma if tma else grouped).mixture(on_gpu(), x, weighted(x.dtype), MixtureCall(picked))
    assert relative(found, ref) < 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_mixture_matches_torch(tokens, dtype, biased):
    """biased: gpt-oss-20b, with its activation; else Qwen3-30B-A3B."""

    torch.manual_seed(tokens)
    experts, k, hidden, size = (32, 4, 2880, 2880) if biased else (128, 8, 2048, 768)
    # Each token's experts stand far above the others, so that no rounding changes who is picked.
    router = torch.linalg.qr(torch.randn(hidden, experts, device="cuda")).Q.t().contiguous()
    levels = torch.zeros(tokens, experts, device="cuda")
    for line in levels:
        line[torch.randperm(experts, device="cuda")[:k]] = torch.linspace(10, 20, k, device="cuda")
    x, residual = (levels @ router).to(dtype), torch.randn(tokens, hidden, device="cuda").to(dtype)
    router, norm = router.to(dtype), torch.rand(hidden, device="cuda") + 0.5
    gate_up = torch.randn(experts, 2 * size, hidden, device="cuda").to(dtype) * 0.02
    down = torch.randn(experts, hidden, size, device="cuda").to(dtype) * 0.03
    call, more = MixtureCall(router=router, norm_weight=norm.to(dtype), eps=1e-6, residual=residual), {}
    if biased:
        inner, outer = (torch.randn(experts, size, device="cuda").to(dtype) for size in (2 * size, hidden))
        more = {"gate_up_bias": inner, "down_bias": outer, "activation": "swiglu_oai"}
        call = call._replace(router_bias=torch.rand(experts, device="cuda").to(dtype))
    weighted = experts_of(gate_up, down, k, **more)
    mixture, reference = ExpertsKernels("plain", on_gpu()), by_torch(x, weighted, call)
    for _ in range(3):  # each launch may overlap the one before
        assert relative(mixture(x, weighted, call), reference) < 2e-2


@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
@pytest.mark.parametrize("experts", [8, 60, 128])
def test_mixtures_that_start_early_see_what_the_ones_before_wrote(tokens, experts):
    """A chain of layers as one graph, replayed with other tokens each time, against launches that wait for others."""
    torch.manual_seed(experts)
    k, hidden, size = 4, 1024, 256
    layers = [
        (
            torch.randn(experts, hidden, device="cuda").bfloat16() * 0.1,
            torch.randn(experts, 2 * size, hidden, device="cuda").bfloat16() * 0.03,
            torch.randn(experts, hidden, size, device="cuda").bfloat16() * 0.06,
        )
        for _ in range(4)
    ]
    norm = torch.rand(hidden, device="cuda").bfloat16() + 0.5
    ops, patient = (ExpertsKernels("plain", on_gpu(dependent_launch=early)) for early in (True, False))

    def chain(by, x):
        for router, gate_up, down in layers:
            call = MixtureCall(router=router, norm_weight=norm, eps=1e-6, residual=x)
            x = by(x, experts_of(gate_up, down, k), call)
        return x

    x = torch.zeros(tokens, hidden, device="cuda").bfloat16()
    chain(ops, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(ops, x)
    for _ in range(200):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, chain(patient, x))


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_router_beside_the_product_before_matches_torch(renormalize):

    torch.manual_seed(0)
    experts, k, hidden, size_in, size = 128, 8, 2048, 4096, 768
    # As above: experts stand far above others, by the residual.
    router = torch.linalg.qr(torch.randn(hidden, experts, device="cuda")).Q.t().contiguous()
    levels = torch.zeros(1, experts, device="cuda")
    levels[0, torch.randperm(experts, device="cuda")[:k]] = torch.linspace(10, 20, k, device="cuda")
    residual, x = (levels @ router).bfloat16(), torch.randn(1, size_in, device="cuda").bfloat16()
    product = (torch.randn(hidden, size_in, device="cuda") * 1e-3).bfloat16()
    router, norm_weight = router.bfloat16(), (torch.rand(hidden, device="cuda") * 0.1 + 1).bfloat16()
    gate_up = (torch.randn(experts, 2 * size, hidden, device="cuda") * 0.02).bfloat16()
    down = (torch.randn(experts, hidden, size, device="cuda") * 0.03).bfloat16()
    norm = {"norm_weight": norm_weight, "eps": 1e-6}
    states = TORCH.plain.linear(x, product, GemmCall(residual=residual))
    weighted = experts_of(gate_up, down, k, renormalize)
    expected = by_torch(states, weighted, MixtureCall(router=router, residual=states, **norm))
    mixture = ExpertsKernels("plain", on_gpu())
    early = mixture.early_router(router, norm_weight, product, weighted)
    for _ in range(3):  # each launch may overlap the one before
        assert relative(mixture(x, weighted, MixtureCall(residual=residual, early=early, **norm)), expected) < 2e-2


def test_routers_that_start_early_see_what_was_written_before():
    """A chain of layers as one graph, replayed with another token each time, against launches that wait for others."""
    torch.manual_seed(0)
    experts, k, hidden, size = 60, 4, 1024, 256
    ops, patient = (ExpertsKernels("plain", on_gpu(dependent_launch=early)) for early in (True, False))
    norm = torch.rand(hidden, device="cuda").bfloat16() + 0.5
    layers = []
    for _ in range(4):
        router = torch.randn(experts, hidden, device="cuda").bfloat16() * 0.1
        product = torch.randn(hidden, hidden, device="cuda").bfloat16() * 0.03
        gate_up = torch.randn(experts, 2 * size, hidden, device="cuda").bfloat16() * 0.03
        down = torch.randn(experts, hidden, size, device="cuda").bfloat16() * 0.06
        weighted = experts_of(gate_up, down, k)
        layers.append((ops.early_router(router, norm, product, weighted), weighted))

    def chain(by, x):
        for early, weighted in layers:
            attended = by.kernels.ops.rms_norm(x, norm, 1e-6)
            x = by(attended, weighted, MixtureCall(norm_weight=norm, eps=1e-6, residual=x, early=early))
        return x

    x = torch.zeros(1, hidden, device="cuda").bfloat16()
    chain(ops, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(ops, x)
    for _ in range(200):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, chain(patient, x))


@pytest.mark.parametrize("experts", [128, 60])
def test_route_matches_torch(experts):

    logits = torch.randn(300, experts, device="cuda")
    for renormalize in (True, False):
        ids, weights = on_gpu().route(logits, 8, renormalize)
        expected_ids, expected_weights = TORCH.route(logits, 8, renormalize)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)
    ids, _ = on_gpu().route(torch.full_like(logits, float("nan")), 8, True)
    assert int(ids.max()) < experts


def test_choice_of_experts_matches_torch():
    from minisgl_backend.kernels.moe.router_config import RouterConfig

    groups = {"num_groups": 8, "groups_per_token": 4, "scaling": 2.5}
    for experts, more in ((256, groups), (160, groups), (384, {})):
        router = RouterConfig(scores="sigmoid", **more)
        logits, bias = torch.randn(300, experts, device="cuda"), torch.randn(experts, device="cuda")
        ids, shares = on_gpu().choose_experts(logits, router, 8, bias)
        expected_ids, expected_shares = TORCH.choose_experts(logits, router, 8, bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares, expected_shares)
