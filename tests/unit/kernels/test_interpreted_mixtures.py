"""Kernels of mixtures of experts against their torch references.

In Triton's interpreter: no GPU needed. tests/gpu runs them compiled. In small shapes here, since the interpreter
executes one program after the other.
"""

from __future__ import annotations

import math

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.moe.call import EarlyRouter, MixtureCall, Picked
from minisgl_backend.kernels.moe.router_config import RouterConfig
from tests.mixtures import TORCH, by_torch, experts_of, interpreted

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.linear.plain.small_rows import LinearWorkspace
from minisgl_backend.kernels.moe import early_router, few_plan, few_tokens, grouped, grouped_tma, one_token
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.few_plan import plan_few

CPU = torch.device("cpu")


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (6, 3), (1, 1)])
def test_route(experts, k, renormalize):
    torch.manual_seed(experts)
    logits = torch.randn(5, experts)
    logits[0, : experts - 1] = -200.0  # all but one share underflow: the padding must not be picked
    ids, weights = interpreted().route(logits, k, renormalize)
    expected_ids, expected_weights = TORCH.route(logits, k, renormalize)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ids[1:], expected_ids[1:])
    assert ids.dtype == torch.int64
    assert all(len(set(line)) == k and max(line) < experts for line in ids.tolist())


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("experts", "k", "router"),
    [
        (160, 6, RouterConfig(renormalize=False, num_groups=8, groups_per_token=3, scaling=16.0)),
        (256, 8, RouterConfig(scores="sigmoid", num_groups=8, groups_per_token=4, scaling=2.5)),
        (24, 8, RouterConfig(scores="sigmoid")),
        (12, 2, RouterConfig(scores="sigmoid", renormalize=False, on_input=True)),
        (6, 6, RouterConfig(num_groups=3, groups_per_token=3)),
    ],
)
def test_choice_of_experts(experts, k, router, corrected):
    torch.manual_seed(experts)
    logits, bias = torch.randn(7, experts + 3)[:, :experts], torch.randn(experts) if corrected else None
    ids, shares = interpreted().choose_experts(logits, router, k, bias)
    expected_ids, expected_shares = TORCH.choose_experts(logits, router, k, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected_shares, atol=1e-6, rtol=1e-5)


def test_choice_of_experts_with_nan():
    router = RouterConfig(scores="sigmoid", num_groups=4, groups_per_token=2)
    logits = torch.randn(3, 16)
    logits[0], logits[1, ::2], logits[2] = math.nan, math.inf, 0.0
    ids, _ = interpreted().choose_experts(logits, router, 4, torch.zeros(16))
    assert all(len(set(line)) == 4 and min(line) >= 0 and max(line) < 16 for line in ids.tolist())
    assert ids[2].tolist() == [0, 1, 2, 3], "of equal ones the lower first"


@pytest.mark.parametrize(
    ("num_tokens", "experts", "tma"),
    [(3, 8, False), (40, 2, False), (70, 6, False), (150, 3, False), (400, 2, False), (30, 3, True), (290, 3, True)],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_moe(num_tokens, experts, tma, with_residual):
    """In tiles of 16, 32, 64 and 128, over one block of the sort and several, with tensor memory access and without."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 64)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2)
    size = 192 if tma else 48
    gate_up, down = torch.randn(experts, 2 * size, 64) * 0.1, torch.randn(experts, 64, size) * 0.1
    residual = torch.randn(num_tokens, 64) if with_residual else None
    arguments = x, experts_of(gate_up, down), MixtureCall(Picked(ids, weights), residual=residual)
    expected = by_torch(*arguments)
    found = (grouped_tma if tma else grouped).mixture(interpreted(), *arguments)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "tma"), [(5, False), (40, True)])
@pytest.mark.parametrize("adds_outer", [False, True])
def test_moe_with_biases(num_tokens, tma, adds_outer):
    """As of gpt-oss; of ranks but the first, that of down is not added."""
    torch.manual_seed(num_tokens)
    experts, hidden, size = 3, 64, 160 if tma else 40
    x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, 2)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(num_tokens)])
    gate_up, down = torch.randn(experts, 2 * size, hidden), torch.randn(experts, hidden, size) * 0.1
    biases = {"gate_up_bias": torch.randn(experts, 2 * size)}
    biases |= {"down_bias": torch.randn(experts, hidden)} if adds_outer else {}
    weighted = experts_of(gate_up, down, activation="swiglu_oai", **biases)
    found = (grouped_tma if tma else grouped).mixture(interpreted(), x, weighted, MixtureCall(Picked(ids, weights)))
    expected = by_torch(x, weighted, MixtureCall(Picked(ids, weights)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (5, 3), (60, 8)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_mixture_of_one_token(experts, k, renormalize, complete):
    """`complete`: with norm and residual."""
    torch.manual_seed(experts)
    hidden, size = 96, 40
    x, router = torch.randn(1, hidden), torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    more = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6, "residual": torch.randn(1, hidden)}
    call = MixtureCall(router=router, **(more if complete else {}))
    arguments = x, experts_of(gate_up, down, k, renormalize), call
    expected, found = by_torch(*arguments), one_token.mixture(interpreted(), *arguments)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "outer"), [(1, True), (1, False), (3, True), (11, False)])
def test_mixture_with_biases(num_tokens, outer):
    """As of gpt-oss, with one of the router: of one token, of a few, and of more than the router's kernel plans for."""
    torch.manual_seed(num_tokens)
    experts, k, hidden, size = 6, 2, 96, 40
    x, router = torch.randn(num_tokens, hidden), torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    biases = {"gate_up_bias": torch.randn(experts, 2 * size)}
    biases |= {"down_bias": torch.randn(experts, hidden)} if outer else {}
    more = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6, "residual": torch.randn(num_tokens, hidden)}
    call = MixtureCall(router=router, router_bias=torch.randn(experts), **more)
    arguments = x, experts_of(gate_up, down, k, activation="swiglu_oai", **biases), call
    found = (one_token if num_tokens == 1 else few_tokens).mixture(interpreted(), *arguments)
    torch.testing.assert_close(found, by_torch(*arguments), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("experts", "k", "size_in"), [(8, 2, 64), (5, 3, 200), (60, 8, 96)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_mixture_whose_router_runs_in_parallel_with_o_proj(experts, k, size_in, renormalize):
    torch.manual_seed(experts)
    hidden, size = 96, 40
    x, residual = torch.randn(1, size_in), torch.randn(1, hidden)
    o_proj, router = torch.randn(hidden, size_in) * 0.1, torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    norm = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6}
    states = TORCH.plain.linear(x, o_proj, GemmCall(residual=residual))
    weighted = experts_of(gate_up, down, k, renormalize)
    expected = by_torch(states, weighted, MixtureCall(router=router, residual=states, **norm))
    early = EarlyRouter.of(router, norm["norm_weight"], o_proj)
    hidden_states, _ = early_router.output_and_logits(x, early, residual, k)
    torch.testing.assert_close(hidden_states, states, atol=1e-5, rtol=1e-4)
    call = MixtureCall(residual=residual, early=early, **norm)
    found = early_router.mixture(interpreted(), x, weighted, call)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_mixture_of_one_token_with_nan(poison):
    """No address outside of the weights is read, and the result stays NaN."""
    x = torch.full((1, 32), poison)
    router, gate_up, down = torch.randn(6, 32), torch.randn(6, 32, 32), torch.randn(6, 32, 16)
    call = MixtureCall(router=router, norm_weight=torch.ones(32), eps=1e-6)
    found = one_token.mixture(interpreted(), x, experts_of(gate_up, down, 2), call)
    assert not torch.isfinite(found).any()


# Tokens, experts, choices of each token.
FEW = ((2, 8, 2), (5, 5, 3), (8, 60, 8), (8, 3, 1), (3, 20, 15), (3, 20, 16), (11, 12, 4), (33, 3, 2), (64, 20, 4))
LARGEST = ((8, 60, 8), (64, 20, 4))


@pytest.mark.parametrize(
    ("num_tokens", "experts", "k", "renormalize", "complete"),
    # Every pair of values: the two switches equal where the place is even, else unequal. Of the largest, half in full.
    [
        pytest.param(
            *few, first, first == (place % 2 == 0), marks=[pytest.mark.full] if few in LARGEST and first else []
        )
        for place, few in enumerate(FEW)
        for first in (False, True)
    ],
)
def test_mixture_of_a_few_tokens(num_tokens, experts, k, renormalize, complete):
    """Planned by the router and behind it, with tiles that are packed and that hold too many choices for it, one an
    expert and several. `complete`: with norm and residual."""
    torch.manual_seed(num_tokens)
    hidden, size, kernels = 96, 40, interpreted()
    x, router = torch.randn(num_tokens, hidden), torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    more = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6, "residual": torch.randn(num_tokens, hidden)}
    call = MixtureCall(router=router, **(more if complete else {}))
    arguments = x, experts_of(gate_up, down, k, renormalize), call
    expected = by_torch(*arguments)
    for _ in range(2):  # the counter is back at zero after each launch
        found = few_tokens.mixture(kernels, *arguments)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert int(kernels.plain.workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_with_nan_affects_no_other(num_tokens, poison):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32)
    router, gate_up, down = torch.randn(6, 32), torch.randn(6, 32, 32), torch.randn(6, 32, 16)
    call = MixtureCall(router=router, norm_weight=torch.ones(32), eps=1e-6)
    arguments = experts_of(gate_up, down, 2), call
    expected = by_torch(x, *arguments)
    x[1] = poison
    found = few_tokens.mixture(interpreted(), x, *arguments)
    assert not torch.isfinite(found[1]).any()
    others = torch.arange(num_tokens) != 1
    torch.testing.assert_close(found[others], expected[others], atol=1e-5, rtol=1e-4)


def test_an_expert_has_as_few_tiles_as_hold_its_tokens():
    """Of equal logits the lower expert comes first; tiles beyond those used belong to none."""
    workspace = LinearWorkspace(CPU, max_out=128, max_split=8)
    x, router = torch.ones(20, 32), torch.zeros(6, 32)
    _, plan = plan_few(x, MixtureCall(router=router), 2, True, workspace)
    assert plan.expert.tolist() == [0, 0, 1, 1, -1, -1, -1, -1]
    assert plan.count[:4].tolist() == [16, 4, 16, 4]
    held = [plan.slots[tile, :count].tolist() for tile, count in enumerate(plan.count[:4].tolist())]
    assert held[0] + held[1] == list(range(0, 40, 2))
    assert held[2] + held[3] == list(range(1, 40, 2))
    torch.testing.assert_close(plan.weights, torch.full((20, 2), 0.5))


@pytest.mark.parametrize("num_tokens", [2, 5, 8])
def test_a_packed_tile_is_an_expert_with_the_choice_of_each_of_its_tokens(num_tokens):
    torch.manual_seed(num_tokens)
    experts, k = 20, 3
    x, router = torch.randn(num_tokens, 32), torch.randn(experts, 32)
    workspace = LinearWorkspace(CPU, max_out=128, max_split=8)
    _, plan = plan_few(x, MixtureCall(router=router), k, True, workspace)
    ids, weights = TORCH.route(x @ router.t(), k, True)
    assert plan.is_packed
    held = {}
    for tile in plan.tiles.tolist():
        choices = [tile >> (4 * token) & 15 for token in range(8)]
        assert all(choice == few_plan.UNPICKED.value for choice in choices[num_tokens:])
        for token, choice in enumerate(choices):
            if choice != few_plan.UNPICKED.value:
                held[token, choice] = tile >> 32
    assert held == {(token, choice): ids[token, choice].item() for token in range(num_tokens) for choice in range(k)}
    used = [tile >> 32 for tile in plan.tiles.tolist() if tile != -1]
    assert used == sorted(set(ids.flatten().tolist()))
    torch.testing.assert_close(plan.weights, weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(65, 128, 16), (700, 5, 16), (513, 1, 64)])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles_of_one(pairs, experts, tile):
    torch.manual_seed(pairs)
    ids = torch.randint(experts, (pairs, 1))
    if experts > 2:
        ids[ids == 2] = 1  # one without pairs
    tiles = align(ids, experts, tile)
    assert tiles.order.tolist() == ids.flatten().argsort(stable=True).tolist()
    held = []
    for expert, first, end in zip(tiles.expert.tolist(), tiles.first.tolist(), tiles.end.tolist(), strict=True):
        if expert >= 0:
            assert 0 < end - first <= tile
            assert set(ids.flatten()[tiles.order[first:end].long()].tolist()) == {expert}
            held += range(first, end)
    assert held == list(range(pairs))
