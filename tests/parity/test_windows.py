"""Sliding windows, chunks and latents (MLA) through the whole engine against transformers: the same tokens, whatever
the options.

Prompts of about 150 tokens over windows and chunks of 24 and less. A short run has rows in which every two of the
options come together once, and two ranks; with `--full` Mistral and a model with latents are in every cell of the
gauge's matrix, with `--full-matrix` all of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.kv.kinds import FULL, Chunked, Sliding
from minisgl_backend.models.config import ModelConfig
from tests.gauge.cells import BASELINE, CELLS, Cell
from tests.gauge.harness import expect_short_answers
from tests.parity.captured import check_greedy
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint, save_tokenizer

MISTRAL = "mistral-window"
MIXTURE = "gemma3"
CHUNKS = "llama4"
SINKS = "gpt_oss"
NAMES = (MISTRAL, MIXTURE, SINKS, CHUNKS)
SMALL, LARGE = UNEQUAL = "gemma4-small-full", "gemma4-large-full"  # groups whose layers differ in the bytes of a token
LATENT = "deepseek_v3-one-group"  # with --full
# Checkpoint, page size, longest chunk, cache, overlap, policy, mixed steps, eager graphs, a small pool. Any two values
# of two columns are in a row (a test below says so).
PAIRWISE = (
    (MISTRAL, 64, 100, "radix", False, "lpm", True, False, True),
    (MISTRAL, 16, None, "naive", False, "fcfs", False, True, False),
    (MISTRAL, 1, 16, "naive", False, "lpm", True, False, False),
    (MISTRAL, 16, 100, "naive", True, "fcfs", False, False, False),
    (MIXTURE, 16, None, "naive", False, "fcfs", False, False, True),
    (MIXTURE, 64, 16, "naive", True, "lpm", True, True, False),
    (MIXTURE, 1, 100, "radix", False, "lpm", False, True, False),
    (SINKS, 1, 16, "naive", True, "fcfs", False, False, True),
    (SINKS, 64, None, "naive", False, "fcfs", True, False, False),
    (SINKS, 16, 100, "radix", False, "lpm", True, True, False),
    (CHUNKS, 1, None, "radix", True, "lpm", True, True, True),
    (CHUNKS, 16, 16, "radix", True, "fcfs", False, True, False),
    (CHUNKS, 64, 100, "naive", False, "lpm", False, False, False),
)
# And cells of the gauge's.
MORE = ((SMALL, "chunk-100"), (SMALL, "starved-chunk-16-sequential"), (LARGE, "starved-lpm"), (LARGE, "tp-2-graphs"))
MAX_SEQ_LEN = 320
NUM_TOKENS = 24  # as many as a window
FEW_TOKENS = 8
STARVED_TOKENS = 112  # more than a page, whatever its size: else nobody's pages need be taken
STARVED_POOL = 768  # tokens: more sequences begin together than can end together
BUSY = 6  # prompts at once


class Case:
    """One checkpoint with long prompts, most of which begin alike, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        save_checkpoint(name, folder)
        save_tokenizer(folder)
        self.name, self.folder = name, folder
        generator = random.Random(name)
        shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(100)]
        lengths = (50, 60, 45, 75)
        self.prompts = [shared + [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
        self.prompts += [self.prompts[0][20:170], self.prompts[1][:5]]
        assert len(self.prompts) == BUSY
        self.expected = self._expected()
        self.unsaid = min(set(range(3, VOCAB_SIZE)).difference(*self.expected))

    def _expected(self) -> list[list[int]]:
        """Tokens of a plain engine, each of which is the likeliest by transformers' model."""
        options = {"dtype": "float32", "num_pages": 256, "max_seq_len_override": MAX_SEQ_LEN, "cache_type": "naive"}
        with LLM(str(self.folder), **options) as llm:
            outputs = llm.generate(self.prompts, temperature=0.0, max_tokens=STARVED_TOKENS, ignore_eos=True)
        model = reference_model(self.folder)
        for prompt, output in zip(self.prompts, outputs, strict=True):
            check_greedy(model, prompt, output.token_ids)
        return [output.token_ids for output in outputs]

    def answers(self, num_tokens: int) -> list[list[int]]:
        return [tokens[:num_tokens] for tokens in self.expected]

    def generate(self, llm: LLM, num_tokens: int) -> list[list[int]]:
        """Whole answers, whose length the engine cannot know: it would not admit what must be preempted later."""
        outputs = llm.generate(
            self.prompts, temperature=0.0, max_tokens=num_tokens, ignore_eos=True, stop_token_ids=(self.unsaid,)
        )
        return [output.token_ids for output in outputs]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: Case(name, tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def pairwise_cells() -> Iterator[tuple[str, Cell]]:
    for name, page_size, chunk, cache_type, overlap, policy, mixed, graphs, starved in PAIRWISE:
        options: dict[str, Any] = {"page_size": page_size, "cache_type": cache_type, "schedule_policy": policy}
        options |= {"max_prefill_length": chunk, "mixed_prefill_length": chunk if mixed else 0}
        yield name, Cell(f"pairs-{page_size}-{chunk}-{starved}", options, overlap, graphs, starved)
    yield from ((name, cell) for name, named in MORE for cell in CELLS if cell.name == named)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--full-matrix")
        short = list(pairwise_cells())
        named = (*NAMES, *UNEQUAL) if whole else (MISTRAL,)
        rest = [(name, cell) for name in (*named, LATENT) for cell in CELLS if (name, cell) not in short]
        rows = [pytest.param(name, cell, id=f"{name}-{cell.name}") for name, cell in short]
        marks = [] if whole else [pytest.mark.full]
        rows += [pytest.param(name, cell, id=f"{name}-{cell.name}", marks=marks) for name, cell in rest]
        metafunc.parametrize(("case", "cell"), rows, indirect=["case"])
    elif "case" in metafunc.fixturenames and "overlap" not in metafunc.fixturenames:
        metafunc.parametrize("case", NAMES, indirect=True)


def test_any_two_values_are_in_a_row() -> None:
    values = [list(dict.fromkeys(column)) for column in zip(*PAIRWISE, strict=True)]
    assert [len(those) for those in values] == [len(NAMES), 3, 3, 2, 2, 2, 2, 2, 2]
    for one, other in combinations(range(len(values)), 2):
        assert {(row[one], row[other]) for row in PAIRWISE} == set(product(values[one], values[other]))


def test_the_windows_are_there(case: Case) -> None:
    """Without them the answers would be others."""
    config = ModelConfig.load(case.folder)
    assert any(layer.mixer.window or layer.mixer.chunk for layer in config.layers)
    path = case.folder / "config.json"
    kept = path.read_text()
    path.write_text(re.sub('"(sliding_window|attention_chunk_size)": ', r"\g<0>4", kept))
    try:
        with LLM(str(case.folder), dtype="float32", max_seq_len_override=MAX_SEQ_LEN, num_pages=256) as llm:
            assert case.generate(llm, NUM_TOKENS) != case.answers(NUM_TOKENS)
    finally:
        path.write_text(kept)


def test_the_same_tokens_in_every_cell(case: Case, cell: Cell) -> None:
    options: dict[str, Any] = {**BASELINE, "max_running_requests": BUSY, **cell.options}
    options["num_pages"] = (STARVED_POOL if cell.starved else 4096) // options["page_size"]
    environment = Environment(
        overlap=cell.overlap, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=cell.eager_graphs
    )
    with LLM(str(case.folder), environment=environment, max_seq_len_override=MAX_SEQ_LEN, **options) as llm:
        if cell.starved:
            expect_short_answers(llm)
            assert case.generate(llm, STARVED_TOKENS) == case.answers(STARVED_TOKENS)
            # Where all layers have a window, rows whose prompt fills it grow no further.
            grows = FULL in llm.engine.core._scheduler._limits.cache_kinds  # type: ignore[attr-defined]
            # Columns of several large pages may let in no more sequences than can end.
            grows = grows and (case.name not in UNEQUAL or (case.name, cell.name) in MORE)
            assert llm.stats.total_preempted > 0 or not grows, "this cell must take pages from running sequences"
        else:
            assert case.generate(llm, NUM_TOKENS) == case.answers(NUM_TOKENS)
            assert case.generate(llm, FEW_TOKENS) == case.answers(FEW_TOKENS), "with every prompt in the prefix cache"
        assert llm.stats.pages_leased == 0


@pytest.mark.parametrize(
    ("case", "page_size", "overlap"),
    [
        *((MISTRAL, 1, False), (MISTRAL, 16, True), (MIXTURE, 1, True), (MIXTURE, 16, False), (CHUNKS, 16, True)),
        *((SMALL, 8, True), (LARGE, 1, False)),
    ],
    indirect=["case"],
)
def test_pages_behind_the_window_are_given_back(case: Case, page_size: int, overlap: bool) -> None:
    """Counted in every step, by cache group: what a row's next token and the chunks in flight may see, and no page
    more. Groups without a window keep all."""
    most = 32
    environment = Environment(overlap=overlap, log_level="WARNING", flashinfer_tensor_cores=None)
    options = {"max_running_requests": BUSY, "page_size": page_size, "max_prefill_length": most, "dtype": "float32"}
    with LLM(str(case.folder), environment=environment, max_seq_len_override=MAX_SEQ_LEN, **options) as llm:
        scheduler = llm.engine.core._scheduler  # type: ignore[attr-defined]
        running, commit, held = scheduler._running, scheduler.commit, {True: 0, False: 0}
        groups = running.kv.groups
        window, chunk = Sliding(24), Chunked(24)
        expected = {
            MISTRAL: (window,),
            MIXTURE: (FULL, window, window),
            CHUNKS: (FULL, chunk, chunk),
            SMALL: (FULL, *[window] * 4),
            LARGE: (FULL, FULL, window, window),
        }
        assert groups.kinds == expected[case.name]
        column = page_size * (2 if case.name in UNEQUAL else 1)
        kept = -(-24 // column)

        def count() -> None:
            for one in running.active():
                decodes = one not in running.prefilling and one.row not in in_prefill
                pages = (running.kv.pages_of(one.lease) > 0).sum(axis=1)
                held[decodes] = max(held[decodes], *pages[groups.num_full :].tolist())
                computed = int(running.rows.total[one.row]) - 1  # and a token that was sampled
                assert (pages[: groups.num_full] >= groups.pages_for(computed)).all()

        in_prefill: list[int] = []  # rows of chunks in flight
        plan_step = scheduler.plan

        def counted_plan() -> Any:
            plan = plan_step()
            in_prefill.extend(chunk.row for chunk in (plan.prefill if plan is not None else ()))
            count()
            return plan

        def counted_commit(plan: Any, result: Any) -> None:
            commit(plan, result)
            for chunk in plan.prefill:
                in_prefill.remove(chunk.row)
            count()
            scheduler.check()

        scheduler.plan, scheduler.commit = counted_plan, counted_commit
        assert case.generate(llm, 2 * NUM_TOKENS) == case.answers(2 * NUM_TOKENS)
        assert case.generate(llm, FEW_TOKENS) == case.answers(FEW_TOKENS), "with every prompt in the prefix cache"
        assert llm.stats.total_cached_tokens > 0
        assert held[True] == kept + 1
        in_flight = (1 + overlap) * (most // column + 1)
        assert kept + 1 < held[False] <= kept + 1 + in_flight
        assert llm.stats.pages_leased == 0
        assert llm.stats.pages_cached > kept, "what was given back stays cached"
