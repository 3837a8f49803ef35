"""Kernels of sampling and of the row tables against their torch references.

In Triton's interpreter: no GPU needed. tests/gpu runs them compiled. In small shapes here, since the interpreter
executes one program after the other.
"""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.request import SamplingParams
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.metadata import SamplingInputs
from minisgl_backend.sampling.params import encode_params, flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts
from minisgl_backend.sampling.sampler import Sampler

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import row_tables as rows
from minisgl_backend.kernels.sampling.launch import SamplingKernels, SamplingTuning
from tests.sampling_cases import SamplingCase, logits_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["normal", "bf16", "equal"])
def test_sampling_is_that_of_the_sampler(kind: str):
    """Every option; with room for 128 tokens near a border, so that some rows need the slow way."""
    vocab_size = 300
    case = SamplingCase(vocab_size, CPU, 1)
    n = len(case.names)
    sampling = SamplingKernels(n, vocab_size, CPU, SamplingTuning(slice=128, candidates=128, pivots=4, rounds=2))
    logits = logits_of(kind, n, vocab_size, 1)
    before = logits.clone()
    reference, kernels = case.sampler(), case.sampler(sampling)
    expected, found = reference.sample(logits, case.inputs), kernels.sample(logits, case.inputs)
    assert found.t().tolist() == expected.t().tolist()
    assert torch.equal(reference.counts, kernels.counts)
    assert torch.equal(logits, before)
    assert int(sampling.counters.abs().sum()) == 0


DISTRIBUTIONS = ("peaked", "flat", "equal", "huge", "masked", "outlier")


@pytest.mark.parametrize("shape", DISTRIBUTIONS)
def test_borders_of_top_p_and_top_k(shape: str, pytestconfig: pytest.Config):
    """Against the torch sampler, on distributions that make a bracket narrow at once, late or never."""
    vocab_size, n = 600, 9
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(7)) * 0.5
    if shape == "peaked":
        logits *= 10
    if shape == "equal":
        logits.zero_()
    if shape == "huge":
        logits *= 1e4
    if shape == "masked":
        logits[:, torch.arange(vocab_size) % 7 != 0] = -float("inf")
        logits[0, 1:] = -float("inf")
        logits[1] = -float("inf")
    if shape == "outlier":
        logits[:, 500] = 12.0
    logits = logits.bfloat16()
    options = [
        {"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.01, "top_p": 0.95}, {"temperature": 5.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_p": 0.999999},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.3}, {"temperature": 1.0, "top_k": 200},
        {"temperature": 1.0, "top_k": 150, "min_p": 0.3}, {"temperature": 1.0, "top_k": 200, "top_p": 0.9},
    ]  # fmt: skip
    params = [SamplingParams(**one, seed=line) for line, one in enumerate(options)]
    table = torch.stack([torch.from_numpy(encode_params(one, vocab_size).copy()) for one in params])
    rows, positions = torch.arange(n, dtype=torch.int32), torch.arange(20, 20 + n, dtype=torch.int32)
    flags = 0
    for one in params:
        flags |= flags_of(one, vocab_size)
    inputs = SamplingInputs(rows=rows, positions=positions, flags=flags, searches=True, mask_index=None, mask_bits=None)
    tokens, counts = torch.zeros(n, 64, dtype=torch.int32), PenaltyCounts(n, vocab_size, CPU)
    rules = TokenRules(n, (), 64, CPU)
    expected = Sampler(table, tokens, counts, rules).sample(logits, inputs)
    # Programs with one slice, and with several; a bracket that two rounds make narrow, and one that stays wide.
    settings = [
        {"slice": 256, "candidates": 128, "pivots": pivots, "rounds": rounds, "programs": programs}
        for programs, pivots, rounds in ((64, 8, 3), (16, 16, 2), (1, 4, 1))
    ]
    settings.append({})  # one slice, and room for all tokens
    if not pytestconfig.getoption("--full", default=False):  # each with half of the distributions
        settings = settings[DISTRIBUTIONS.index(shape) % 2 :: 2]
    for setting in settings:
        kernels = SamplingKernels(n, vocab_size, CPU, SamplingTuning(**setting))
        found = Sampler(table, tokens, counts, rules, kernels).sample(logits, inputs)
        assert found.tolist() == expected.tolist()
        assert int(kernels.counters.abs().sum()) == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_sampling_marks_unsound_rows(poison: float):
    names = ["greedy", "temperature", "top-k and top-p", "top-p", "min-p", "repetition"]
    case = SamplingCase(300, CPU, 2, names)
    logits = logits_of("normal", len(names), 300, 2)
    logits[::2, 70] = poison
    kernels = SamplingKernels(len(names), 300, CPU, SamplingTuning(slice=128, candidates=128))
    found = case.sampler(kernels).sample(logits, case.inputs)
    assert found[1].tolist() == [0, 1] * 3
    assert ((found[0] >= 0) & (found[0] < 300)).all()


@pytest.mark.parametrize("kind", ["normal", "equal"])
@pytest.mark.parametrize("top", [0, 5])
def test_log_probabilities(kind: str, top: int):
    vocab_size = 300
    case = SamplingCase(vocab_size, CPU, 1)
    kernels = SamplingKernels(2, vocab_size, CPU, SamplingTuning(slice=128, candidates=128))
    logits, token_ids = logits_of(kind, 4, vocab_size, 1), torch.tensor([7, 299, 12, 0], dtype=torch.int32)
    lines = torch.tensor([3, 0, 1], dtype=torch.int32)
    expected = case.sampler().logprobs(logits, lines, token_ids, top)
    found = case.sampler(kernels).logprobs(logits, lines, token_ids, top)
    ints, floats = [0, *range(2, 3 + top)], [1, *range(3 + top, 3 + 2 * top)]
    torch.testing.assert_close(found[:, floats].view(torch.float32), expected[:, floats].view(torch.float32))
    assert torch.equal(found[:, ints], expected[:, ints])


def test_row_tables():
    tokens = torch.randint(0, 99, (5, 40)).int()
    tables = torch.randint(1, 30, (2, 5, 10)).int()
    lines, positions = torch.tensor([4, 0, 2]).int(), torch.tensor([39, 0, 17]).int()
    shifts = torch.tensor([-0, 1, -7, 2, -30]).int()
    for moved in (None, shifts):
        ids, slots, shifted = rows.lookup(lines, positions, tokens, tables, 4, moved)
        assert shifted.tolist() == (positions if moved is None else positions + shifts[lines]).tolist()
    assert ids.tolist() == tokens[lines, positions].tolist()
    assert slots.tolist() == (tables[:, lines, positions // 4] * 4 + positions % 4).tolist()
    rows.scatter(tokens, lines, positions, torch.tensor([7, 8, 9]).int())
    assert tokens[lines, positions].tolist() == [7, 8, 9]
