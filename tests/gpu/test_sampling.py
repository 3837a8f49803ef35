"""The sampling kernels, compiled, against the torch sampler on the same device and at a real vocabulary."""

from __future__ import annotations

import pytest
import torch

from tests.sampling_cases import OPTIONS, SamplingCase, logits_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
VOCAB = 151_936


def kernels_of(n: int, vocab_size: int = VOCAB, pdl: bool | None = None, **sizes: int):
    from minisgl_backend.kernels.sampling.launch import SamplingKernels, SamplingTuning

    return SamplingKernels(n, vocab_size, DEVICE, SamplingTuning(**sizes), pdl)


@pytest.mark.parametrize("kind", ["normal", "bf16", "equal"])
@pytest.mark.parametrize("vocab_size", [VOCAB, 700, 32_003])
def test_every_option_is_that_of_torch(kind: str, vocab_size: int) -> None:
    ours = kernels_of(len(OPTIONS), vocab_size)
    differ = []
    for seed in range(6):
        case = SamplingCase(vocab_size, DEVICE, seed)
        logits = logits_of(kind, len(OPTIONS), vocab_size, seed).to(DEVICE)
        reference, kernels = case.sampler(), case.sampler(ours)
        expected = reference.sample(logits, case.inputs)
        found = kernels.sample(logits, case.inputs)
        pairs = zip(case.names, expected.t().tolist(), found.t().tolist(), strict=True)
        differ += [(seed, name, right, wrong) for name, right, wrong in pairs if right != wrong]
        if not differ:
            assert torch.equal(reference.counts, kernels.counts)
    # The kernels' logarithm of the noise is an instruction with an error of its own, which may swap near-equal scores.
    assert len(differ) <= 1, differ
    assert int(ours.counters.abs().sum()) == 0


@pytest.mark.parametrize("pdl", [False, True])
def test_temperature_alone_is_that_of_torch(pdl: bool) -> None:
    case = SamplingCase(VOCAB, DEVICE, 5, ["greedy", "temperature"])
    logits = logits_of("bf16", 2, VOCAB, 5).to(DEVICE)
    expected = case.sampler().sample_plain(logits, case.rows, case.positions)
    for _ in range(2):
        found = kernels_of(2, pdl=pdl).sample_plain(logits, case.rows, case.positions, case.params)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["normal", "bf16"])
@pytest.mark.parametrize("programs", [1, 64, 1600])
def test_company_changes_nothing(kind: str, programs: int) -> None:
    """Each option alone, and in a batch with all others, where a program reads one slice of a row, some or all of them:
    the same token, to the bit."""
    case = SamplingCase(VOCAB, DEVICE, 3)
    logits = logits_of(kind, len(OPTIONS), VOCAB, 3).to(DEVICE)
    together = case.sampler(kernels_of(len(OPTIONS), programs=programs)).sample(logits, case.inputs)
    for line, name in enumerate(OPTIONS):
        if "grammar" in name:
            continue
        alone = SamplingCase(VOCAB, DEVICE, 3, [name])
        row = int(case.rows[line])
        alone.tokens[0], alone.positions[0] = case.tokens[row], case.positions[line]
        found = alone.sampler(kernels_of(1)).sample(logits[line : line + 1], alone.inputs)
        assert found[:, 0].tolist() == together[:, line].tolist(), name


@pytest.mark.parametrize("kind", ["normal", "bf16", "equal"])
@pytest.mark.parametrize("top", [0, 5, 20])
def test_log_probabilities_are_those_of_torch(kind: str, top: int) -> None:
    logits = logits_of(kind, 9, VOCAB, 1).to(DEVICE)
    case = SamplingCase(VOCAB, DEVICE, 1)
    token_ids = torch.randint(0, VOCAB, (9,)).int().to(DEVICE)
    lines = torch.tensor([7, 0, 3], dtype=torch.int32, device=DEVICE)
    expected = case.sampler().logprobs(logits, lines, token_ids, top)
    found = case.sampler(kernels_of(4)).logprobs(logits, lines, token_ids, top)
    ints, floats = [0, *range(2, 3 + top)], [1, *range(3 + top, 3 + 2 * top)]
    torch.testing.assert_close(found[:, floats].view(torch.float32), expected[:, floats].view(torch.float32))
    assert torch.equal(found[:, ints], expected[:, ints])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_unsound_rows_are_marked(poison: float) -> None:
    case = SamplingCase(VOCAB, DEVICE, 2)
    logits = logits_of("bf16", len(OPTIONS), VOCAB, 2).to(DEVICE)
    logits[::2, 70] = poison
    found = case.sampler(kernels_of(len(OPTIONS))).sample(logits, case.inputs)
    right = [1 - (line % 2 == 0) for line in range(len(OPTIONS))]
    # A grammar that forbids the infinite token has nothing to complain of.
    allowed = [line for line, name in enumerate(OPTIONS) if not (name.startswith("grammar against") and poison > 0)]
    assert [found[1, line].item() for line in allowed] == [right[line] for line in allowed]
    assert bool(((found[0] >= 0) & (found[0] < VOCAB)).all())
