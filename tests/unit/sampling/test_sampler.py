"""The batched sampler against one that goes row by row, and against the distributions that it claims to have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import sampling_reference as reference
import torch

from minisgl_backend.kernels.sampling import layout
from minisgl_backend.request import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.staging import MaskStaging
from minisgl_backend.sampling.gumbel import gumbel, row_keys
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.logprobs import unpack
from minisgl_backend.sampling.metadata import GrammarMasks, SamplingInputs, SamplingRows
from minisgl_backend.sampling.sampler import Sampler
from minisgl_backend.step import AdmittedRow, StepPlan

CPU = torch.device("cpu")
VOCAB = 50
EOS = (2, 3)
EMPTY = np.zeros(0, dtype=np.int32)


@dataclass
class Bench:
    """A sampler and its tables, without a model."""

    max_running: int = 64
    vocab_size: int = VOCAB

    def __post_init__(self) -> None:
        self.table = RowTable(max_running=self.max_running, max_seq_len=64, page_size=4, device=CPU)
        self.rows = SamplingRows(self.table.max_rows, self.vocab_size, EOS, 64, CPU)
        self.builder = BatchBuilder(self.table, self.rows)
        self.sampler = Sampler(self.table.params, self.table.tokens, self.rows.penalties, self.rows.rules)
        self.masks = MaskStaging(self.table.max_rows, self.vocab_size, CPU)

    def admit(self, sequences: dict[int, tuple[SamplingParams, list[int], int]]) -> None:
        """By row: parameters, tokens so far, prompt length."""
        admitted = tuple(
            AdmittedRow(row, row, params, prompt_len, np.array(tokens, dtype=np.int32), 0)
            for row, (params, tokens, prompt_len) in sequences.items()
        )
        self._upload(admitted, EMPTY, EMPTY)

    def inputs(
        self, rows: Sequence[int], positions: Sequence[int], masks: GrammarMasks | None = None
    ) -> SamplingInputs:
        inputs = self._upload((), np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int32))
        if masks is None:
            return inputs
        index, bits = self.masks.upload(len(rows), *masks)
        return dataclasses.replace(inputs, mask_index=index, mask_bits=bits)

    def sample(
        self, logits: np.ndarray, rows: Sequence[int], positions: Sequence[int], masks: GrammarMasks | None = None
    ) -> torch.Tensor:
        """Tokens and soundness, int32 [2, n]."""
        token_ids = self.sampler.sample(torch.from_numpy(logits), self.inputs(rows, positions, masks))
        self.table.write_tokens(torch.tensor(rows), torch.tensor(positions), token_ids[0])
        return token_ids

    def _upload(
        self,
        admitted: tuple[AdmittedRow, ...],
        rows: np.ndarray,
        lengths: np.ndarray,
    ) -> SamplingInputs:
        plan = StepPlan(0, admitted, EMPTY, EMPTY, EMPTY, (), rows, lengths, rows.astype(np.int64))
        return self.builder.upload(self.builder.build_host(plan)).sampling


def random_logits(n: int, seed: int = 0, vocab_size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (n, vocab_size)).astype(np.float32)


WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "almost greedy": SamplingParams(temperature=0.5, top_k=1, seed=1),
    "temperature": SamplingParams(temperature=0.7, seed=2),
    "large seed": SamplingParams(temperature=1.5, seed=2**64 - 1),
    "top-k": SamplingParams(temperature=2.0, top_k=5, seed=3),
    "top-p": SamplingParams(temperature=2.0, top_p=0.5, seed=4),
    "tiny top-p": SamplingParams(temperature=2.0, top_p=1e-6, seed=4),
    "min-p": SamplingParams(temperature=3.0, min_p=0.3, seed=5),
    "all three": SamplingParams(temperature=3.0, top_k=10, top_p=0.8, min_p=0.05, seed=6),
    "top-k beyond the vocabulary": SamplingParams(temperature=2.0, top_k=10**12, seed=7),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=5.0),
    "presence and frequency": SamplingParams(
        temperature=1.0, presence_penalty=1.5, frequency_penalty=-0.7, repetition_penalty=0.8, seed=8
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={4: 6.0, 9: -100.0}, seed=9),
    "bad words": SamplingParams(temperature=1.0, bad_words_token_ids=((7,), (8, 9), (1, 1, 10)), seed=10),
    "min tokens": SamplingParams(temperature=1.0, min_tokens=4, stop_token_ids=(11, 12), seed=11),
    "everything": SamplingParams(
        temperature=1.2,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={1: 3.0, 2: 5.0},
        bad_words_token_ids=((1, 2), (5,)),
        min_tokens=6,
        seed=12,
    ),
}


def histories(wishes: Sequence[SamplingParams], seed: int = 0) -> dict[int, tuple[SamplingParams, list[int], int]]:
    """Prompts of small token ids, so that tokens repeat; some sequences come back with an answer."""
    rng = np.random.default_rng(seed)
    found = {}
    for row, wish in enumerate(wishes):
        tokens = rng.integers(0, 12, 4 + row % 5).tolist()
        found[row] = (wish, tokens, max(1, len(tokens) - row % 3))
    return found


def generate(bench: Bench, sequences: dict[int, tuple[SamplingParams, list[int], int]], steps: int) -> dict[int, list]:
    bench.admit(sequences)
    tokens = {row: list(so_far) for row, (_, so_far, _) in sequences.items()}
    for step in range(steps):
        logits = np.stack([random_logits(1, 1000 * step + row)[0] for row in sequences])
        sampled = bench.sample(logits, list(sequences), [len(tokens[row]) for row in sequences])
        for row, token in zip(sequences, sampled[0].tolist(), strict=True):
            tokens[row].append(token)
    return tokens


@pytest.mark.parametrize("name", WISHES)
def test_equals_the_reference(name: str) -> None:
    copies = [msgspec.structs.replace(WISHES[name], seed=(WISHES[name].seed or 0) // 2 + row) for row in range(8)]
    sequences = histories(copies)
    found = generate(Bench(), sequences, 12)
    for row, (params, so_far, prompt_len) in sequences.items():
        tokens = list(so_far)
        for step in range(12):
            logits = random_logits(1, 1000 * step + row)[0]
            tokens.append(reference.sample(logits, params, tokens, prompt_len, EOS))
        assert found[row] == tokens


def test_company_changes_nothing() -> None:
    sequences = histories(list(WISHES.values()))
    together = generate(Bench(), sequences, 10)
    backwards = generate(Bench(), dict(reversed(sequences.items())), 10)
    for row, sequence in sequences.items():
        assert generate(Bench(), {row: sequence}, 10)[row] == together[row] == backwards[row]


def test_another_row_changes_nothing() -> None:
    sequences = histories(list(WISHES.values()))
    bench = Bench()
    bench.admit({row: (WISHES["everything"], [1, 2, 3], 2) for row in range(40)})  # what these rows held before
    moved = {row + 20: sequence for row, sequence in sequences.items()}
    bench.admit(moved)
    together = generate(Bench(), sequences, 1)
    tokens = {row: so_far for row, (_, so_far, _) in moved.items()}
    logits = np.stack([random_logits(1, row - 20)[0] for row in moved])
    sampled = bench.sample(logits, list(moved), [len(so_far) for so_far in tokens.values()])
    assert sampled[0].tolist() == [tokens[-1] for tokens in together.values()]


def test_noise_equals_its_definition() -> None:
    seeds = [0, 1, 12345, 2**32 - 1, 2**63 + 17, 2**64 - 1]
    positions = [0, 1, 77, 131071, 2**31 - 2, 5]
    low = torch.tensor([seed % 2**32 for seed in seeds]).to(torch.int32)
    high = torch.tensor([seed // 2**32 for seed in seeds]).to(torch.int32)
    key0, key1 = row_keys(low, high, torch.tensor(positions, dtype=torch.int32))
    found = gumbel(key0, key1, torch.arange(151936, dtype=torch.int32))
    for line, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in (0, 1, 2, 1023, 65536, 151935):
            assert found[line, token] == pytest.approx(reference.gumbel(seed, position, token), rel=1e-5, abs=1e-6)
    assert torch.isfinite(found).all()
    assert found.mean() == pytest.approx(0.5772, abs=0.01)
    assert found.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Statistic over its standard deviation from the mean: about normal(0, 1) where the distribution is right."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = counts.sum() * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * max(freedom, 1)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.4),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=15, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_distribution(params: SamplingParams, varied: str, pytestconfig: pytest.Config) -> None:
    """50,000 draws that differ only in their position, and 10,000 only in their seed, which are requests each."""
    is_full = pytestconfig.getoption("--full", default=False)
    vocab_size, draws = 20, 50_000 if varied == "position" or is_full else 10_000
    line = random_logits(1, 5, vocab_size)
    bench = Bench(max_running=draws if varied == "seed" else 1, vocab_size=vocab_size)
    rows = np.arange(draws, dtype=np.int32) if varied == "seed" else np.zeros(draws, dtype=np.int32)
    bench.admit({row: (msgspec.structs.replace(params, seed=row), [0], 1) for row in set(rows.tolist())})
    inputs = bench.inputs(rows[:1], [7])
    positions = np.full(draws, 7) if varied == "seed" else np.arange(1, draws + 1)
    inputs = SamplingInputs(
        rows=torch.from_numpy(rows), positions=torch.from_numpy(positions.astype(np.int32)), flags=inputs.flags
    )
    token_ids = bench.sampler.sample(torch.from_numpy(line).expand(draws, -1), inputs)[0].numpy()
    scaled = reference.kept(line[0].astype(np.float64), params)
    weights = np.exp(scaled - scaled.max())
    assert abs(chi_square(np.bincount(token_ids, minlength=vocab_size), weights / weights.sum())) < 5


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of draws at consecutive positions, and of consecutive seeds, over a uniform distribution."""
    size, draws = 8, 200_000
    seeds = torch.arange(draws, dtype=torch.int32)
    zeros = torch.zeros(draws, dtype=torch.int32)
    tokens = torch.arange(size, dtype=torch.int32)
    at_7 = gumbel(*row_keys(seeds, zeros, zeros + 7), tokens).argmax(1)
    at_8 = gumbel(*row_keys(seeds, zeros, zeros + 8), tokens).argmax(1)
    uniform = np.full(size * size, 1 / size**2)
    for first, second in ((at_7, at_8), (at_7[:-1], at_7[1:])):
        pairs = np.bincount((first * size + second).numpy(), minlength=size * size)
        assert abs(chi_square(pairs, uniform)) < 5


def test_rare_tokens_of_a_large_vocabulary_are_drawn() -> None:
    """150,000 equally unlikely tokens share half of the draws evenly, and the noise hardly ever ties."""
    vocab_size, draws = 150_000, 200
    logits = torch.zeros(draws, vocab_size)
    logits[:, 100] = math.log(vocab_size)  # as likely as all others together
    positions = torch.arange(draws, dtype=torch.int32)
    bench = Bench(max_running=1, vocab_size=vocab_size)
    bench.admit({0: (SamplingParams(temperature=1.0, seed=3), [0], 1)})
    inputs = SamplingInputs(rows=torch.zeros(draws, dtype=torch.int32), positions=positions, flags=layout.RANDOM)
    token_ids = bench.sampler.sample(logits, inputs)[0]
    share = (token_ids == 100).float().mean()
    assert share == pytest.approx(0.5, abs=0.15)
    rest = token_ids[token_ids != 100].double()
    assert rest.mean() == pytest.approx(vocab_size / 2, rel=0.25)
    assert len(rest.unique()) > 0.98 * len(rest)


def test_greedy_rows_beside_random_ones_take_the_best() -> None:
    bench = Bench()
    bench.admit({0: (SamplingParams(temperature=0.0), [1], 1), 1: (SamplingParams(temperature=5.0, seed=1), [1], 1)})
    logits = random_logits(2)
    for position in range(1, 30):
        assert bench.sample(logits, [0, 1], [position] * 2)[0, 0] == logits[0].argmax()


def test_half_precision_logits_are_left_alone() -> None:
    bench = Bench()
    bench.admit({0: (WISHES["everything"], [1, 2, 3], 2)})
    logits = torch.from_numpy(random_logits(1)).to(torch.bfloat16)
    before = logits.clone()
    bench.sampler.sample(logits, bench.inputs([0], [3]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unsound_rows_are_marked(poison: float) -> None:
    bench = Bench()
    wishes = (WISHES["greedy"], WISHES["temperature"], WISHES["top-k"], WISHES["min-p"])
    bench.admit({row: (wishes[row % 4], [1], 1) for row in range(8)})
    logits = random_logits(8)
    logits[4:, 7] = poison
    sampled = bench.sample(logits, range(8), [1] * 8)
    assert sampled[1].tolist() == [1] * 4 + [0] * 4
    assert ((sampled[0] >= 0) & (sampled[0] < VOCAB)).all()


def test_steps_ask_only_for_what_their_rows_want() -> None:
    bench = Bench()
    bench.admit(histories(list(WISHES.values())))
    names = list(WISHES)
    plain = bench.inputs([names.index("greedy"), names.index("almost greedy")], [4, 5])
    assert plain.flags == 0
    assert not bench.inputs([names.index("temperature")], [6]).extended
    assert not bench.inputs([names.index("top-k beyond the vocabulary")], [6]).extended
    assert bench.inputs([names.index("temperature"), names.index("bias")], [6, 6]).extended
    assert bench.inputs([names.index("top-k")], [6]).flags == layout.RANDOM | layout.RANKED


def test_a_grammar_wins_over_the_rules_that_leave_it_nothing() -> None:
    bench = Bench()
    wish = SamplingParams(temperature=1.0, seed=1, min_tokens=5, bad_words_token_ids=((9,),))
    bench.admit({row: (wish, [1], 1) for row in range(2)})
    bits = np.array([[1 << EOS[0], 0], [1 << 9 | 1 << 4, 0]], dtype=np.int32)
    sampled = bench.sample(random_logits(2), [0, 1], [1, 1], (np.arange(2, dtype=np.int32), bits))
    assert sampled.tolist() == [[EOS[0], 4], [1, 1]]


def test_masks_in_the_upload_memory_arrive_like_others() -> None:
    """Step after step, with memory that was lent and never used, and with lines of it that are left out."""
    staging, random = MaskStaging(8, VOCAB, CPU), np.random.default_rng(3)
    shape = (5, staging.num_words)
    for turn in range(12):
        expected = random.integers(-(2**31), 2**31, shape, dtype=np.int32)
        lines = np.array([6, 0, 1, 7, 3], dtype=np.int32)
        bits = staging.bitmask_rows(5)
        bits[:] = expected
        if turn % 4 == 1:
            bits = expected
        elif turn % 4 == 2:
            lines, bits, expected = lines[1:], bits[1:], expected[1:]
        elif turn % 4 == 3:
            lines, bits, expected = lines[:3], bits[:3], expected[:3]
        index, found = staging.upload(8, lines, bits)
        assert found.tolist() == expected.tolist()
        assert index[lines.tolist()].tolist() == list(range(len(lines)))
        assert (index == -1).sum() == 8 - len(lines)


def test_there_is_room_for_all_rules_that_a_request_may_have() -> None:
    wish = SamplingParams(
        bad_words=[f"{number}" for number in range(MAX_BAD_WORDS)],
        bad_words_token_ids=[(number, number + 1) for number in range(MAX_BAD_WORD_SPELLINGS)],
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
        stop_token_ids=range(10, 10 + MAX_STOP_TOKEN_IDS),
        min_tokens=3,
    )
    wish.validate(5000)
    rules = TokenRules(2, EOS, 64, CPU)
    rules.admit(1, wish, 1)
    rules.upload()
    ends = len(EOS) + MAX_STOP_TOKEN_IDS
    assert rules.counts[1].tolist() == [MAX_LOGIT_BIAS + ends, MAX_LOGIT_BIAS + ends + MAX_BAD_WORD_SPELLINGS]


def test_rules_that_can_never_apply_leave_none() -> None:
    """A bad word longer than any sequence, and min_tokens without a token that could end the answer."""
    wish = SamplingParams(temperature=0.0, bad_words_token_ids=((4,) * 70,), min_tokens=3)
    rules = TokenRules(2, (), 64, CPU)
    rules.admit(1, SamplingParams(temperature=0.0, logit_bias={3: 9.0}), 1)
    rules.upload()
    rules.admit(1, wish, 1)
    rules.upload()
    assert rules.counts.tolist() == [[0, 0], [0, 0]]
    logits = torch.from_numpy(random_logits(1))
    one = torch.ones(1, dtype=torch.int32)
    assert torch.equal(rules.apply(logits, one, one, torch.zeros(2, 65, dtype=torch.int32)), logits)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    bench = Bench()
    wish = msgspec.structs.replace(WISHES["everything"], logprobs=4)
    bench.admit({0: (WISHES["temperature"], [1], 1), 3: (wish, [1, 2, 3], 2), 5: (wish, [5], 1)})
    logits = random_logits(3)
    sampled = bench.sample(logits, [5, 0, 3], [1, 1, 3])
    lines = torch.tensor([0, 2], dtype=torch.int32)
    found_all = bench.sampler.logprobs(torch.from_numpy(logits), lines, sampled[0], 4)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=1).numpy()
    for line, packed in zip((0, 2), found_all.numpy(), strict=True):
        token = int(sampled[0, line])
        found = unpack(packed, 3)
        order = np.argsort(-expected[line])
        assert found.logprob == pytest.approx(expected[line, token], abs=1e-5)
        assert order[found.rank - 1] == token
        assert found.top_ids == tuple(order[:3].tolist())
        assert found.top == pytest.approx(expected[line, order[:3]].tolist(), abs=1e-5)


def test_penalty_rows_come_and_go() -> None:
    """Lines of the count tables are reused; what their last owner counted is gone."""
    bench = Bench(max_running=6)
    wish = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, :4] = (1.0, 0.9, 0.8, 0.7)
    rng = np.random.default_rng(1)
    for _ in range(30):
        row = int(rng.integers(0, 6))
        wants = bool(rng.integers(0, 2))
        bench.admit({row: (wish if wants else SamplingParams(temperature=0.0), [9, 9], 2)})
        answers = [int(bench.sample(logits, [row], [2 + step])[0, 0]) for step in range(4)]
        assert answers == ([0, 1, 2, 3] if wants else [0, 0, 0, 0])
