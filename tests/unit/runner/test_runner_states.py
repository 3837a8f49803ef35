"""A runner of a model with states answers as transformers does: in chunks, over folds, drafts, retries and captures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from state_plans import StateDriver
from tiny_runner import GREEDY, MakeRunner, run

from minisgl_backend.errors import EngineDeadError
from minisgl_backend.kernels.recurrent.calls import FoldBatch
from minisgl_backend.kv.state import LayerState
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.state_plans import with_states
from minisgl_backend.runner.start.warm_up import StepLimits, decode_plans, warm_up_plans
from minisgl_backend.step import StepPlan, StepResult
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint

_DRAWN = torch.randint(3, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [_DRAWN[0][:5], _DRAWN[1][:33], _DRAWN[2]]
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states")
    save_checkpoint("qwen3_5", made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy tokens of each prompt, whole passes of transformers."""
    model, answers = reference_model(folder), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(STEPS):
            ids = torch.tensor([tokens])
            with torch.inference_mode():
                logits = model(ids, use_cache=False, position_ids=torch.arange(len(tokens))[None]).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def prefill(runner: ModelRunner, driver: StateDriver, chunk: int) -> None:
    """Each prompt in chunks, beside rows that decode already."""
    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, GREEDY)
        for start in range(0, len(prompt), chunk):
            run(runner, driver, driver.plan(prefill={row: min(chunk, len(prompt) - start)}, decode=tuple(range(row))))


def said(driver: StateDriver) -> list[list[int]]:
    return [driver.tokens[row][len(prompt) :][:STEPS] for row, prompt in enumerate(PROMPTS)]


_full = pytest.mark.full


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [pytest.param(1, 7, marks=_full), (4, 64), (4, 8), pytest.param(16, 16, marks=_full), (32, 32)],
)
def test_chunks_and_folds(
    page_size: int, chunk: int, is_captured: bool, make_runner: MakeRunner, folder: Path, expected: list[list[int]]
) -> None:
    captures = {"graph_sizes": (1, 2, 4), "pieces": (8, 17, 64)} if is_captured else {}
    runner, driver = make_runner(page_size, folder=folder, **captures), StateDriver(page_size)
    prefill(runner, driver, chunk)
    while min(map(len, said(driver))) < STEPS:
        run(runner, driver, driver.plan(decode=(2, 0, 1)))
    assert said(driver) == expected


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=_full), 4, pytest.param(16, marks=_full)])
@pytest.mark.parametrize("is_captured", [False, True])
def test_drafts_right_and_wrong(
    page_size: int, is_captured: bool, make_runner: MakeRunner, folder: Path, expected: list[list[int]]
) -> None:
    captures = {"graph_sizes": (1, 4, 8, 12)} if is_captured else {}
    runner = make_runner(page_size, max_running=12, folder=folder, most_drafts=3, **captures)
    driver, step = StateDriver(page_size), 0
    prefill(runner, driver, 64)
    while min(map(len, said(driver))) < STEPS:
        drafts = {}
        for row in range(len(PROMPTS)):
            done = len(driver.tokens[row]) - len(PROMPTS[row])
            guesses = [*expected[row], *[7] * 40][done : done + (step + row) % 4]
            if guesses and (step + row) % 3 == 1:
                guesses[-1] = (guesses[-1] + 1) % VOCAB_SIZE
            drafts[row] = guesses
        run(runner, driver, driver.plan(decode=(0, 1, 2), drafts=drafts))
        step += 1
    assert said(driver) == expected


def test_a_step_may_be_repeated(make_runner: MakeRunner, folder: Path, expected: list[list[int]]) -> None:
    """The second time without its prompts, or whole: neither folds again."""
    page_size = 4
    runner, driver = make_runner(page_size, folder=folder), StateDriver(page_size)

    def twice(plan: StepPlan, without: frozenset[int] = frozenset()) -> StepResult:
        for _ in range(2):
            runner.execute(runner.prepare(plan)).result()
        result = runner.execute(runner.prepare(plan.without(without))).result()
        if not without:
            driver.commit(plan, result.token_ids)
        return result

    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, GREEDY)
        twice(driver.plan(prefill={row: len(prompt)}, decode=tuple(range(row))))
    while min(map(len, said(driver))) < STEPS:
        twice(driver.plan(decode=(0, 1, 2)))
    assert said(driver) == expected


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fold_that_fails_is_not_tried_again(failing: int, make_runner: MakeRunner, folder: Path) -> None:
    """Stacks before have moved already: the engine is dead."""
    page_size = 4
    runner, driver = make_runner(page_size, folder=folder), StateDriver(page_size)
    driver.admit(0, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(PROMPTS[0])}))
    tables = runner._states
    assert tables is not None
    tables.pool.stacks = (*tables.pool.stacks, *tables.pool.stacks)
    fold, calls = tables._kernels.delta_fold, list[LayerState]()

    def fails_once(stack: LayerState, batch: FoldBatch, page_size: int) -> None:
        calls.append(stack)
        if len(calls) == failing + 1:
            raise RuntimeError("no memory")
        fold(stack, batch, page_size)

    tables._kernels = tables._kernels._replace(delta_fold=fails_once)
    while not len((plan := driver.plan(decode=(0,))).fold_rows):
        run(runner, driver, plan)
    with pytest.raises(EngineDeadError, match="in part: no memory"):
        runner.execute(runner.prepare(plan))
    runner.execute(runner.prepare(plan)).result()
    assert len(calls) == failing + 1


def test_kept_states_are_begun_with(make_runner: MakeRunner, folder: Path, expected: list[list[int]]) -> None:
    """One that a chunk leaves on its way, and a row's own, which goes on in another slot."""
    page_size = 4
    runner, driver = make_runner(page_size, folder=folder), StateDriver(page_size)
    prompt = PROMPTS[2]
    driver.admit(0, prompt, GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(prompt)}, checkpoints={0: ((8, 30), (36, 31))}))
    driver.kept.add(1)
    for _ in range(STEPS):
        run(runner, driver, driver.plan(decode=(0,)))
    assert driver.slots[0] == 20
    for row, (slot, border) in enumerate(((30, 8), (31, 36), (1, 40)), start=1):
        more = prompt if border < len(prompt) else [*prompt, *expected[2][:2]]
        driver.admit(row, more, GREEDY)
        driver.begin_with(row, slot, border, pages_of=0)
        run(runner, driver, driver.plan(prefill={row: len(more) - border}))
        for _ in range(6):
            run(runner, driver, driver.plan(decode=(row,)))
        assert driver.tokens[row][len(prompt) :] == expected[2][: len(driver.tokens[row]) - len(prompt)]


def test_what_is_not_a_rows_is_never_read(make_runner: MakeRunner, folder: Path, expected: list[list[int]]) -> None:
    """Slots of no row, tails of free rows and slot 0 are NaN before each step, and padding of captured graphs runs."""
    page_size = 4
    runner, driver = make_runner(page_size, folder=folder, graph_sizes=(1, 2, 4)), StateDriver(page_size)
    assert runner._states is not None
    stack = runner._states.pool.stacks[0]

    def poison() -> None:
        owned = [driver.slots[row] for row in driver.slots]
        free = torch.tensor([slot for slot in range(41) if slot not in owned])
        rows = torch.tensor([row for row in range(7) if row not in driver.slots])
        for tensor in (stack.states, stack.conv):
            tensor[:, free] = torch.nan
        for tensor in (stack.tail_k, stack.tail_u, stack.tail_g, stack.tail_conv):
            tensor[:, rows] = torch.nan

    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, GREEDY)
        poison()
        run(runner, driver, driver.plan(prefill={row: len(prompt)}))
    while min(map(len, said(driver))) < STEPS:
        poison()
        run(runner, driver, driver.plan(decode=(0, 1, 2)))
    assert said(driver) == expected


def test_the_steps_of_a_start_leave_nothing(make_runner: MakeRunner, folder: Path, expected: list[list[int]]) -> None:
    """They read states, write them and fold, in the rows and slots of the first requests."""
    page_size, limits = 4, StepLimits(6, 64, 128)
    runner, driver = make_runner(page_size, folder=folder), StateDriver(page_size)
    for plan in (*warm_up_plans(limits, (1, 2)), *decode_plans(6, (1,))):
        given = with_states(plan, runner)
        assert all(row.state_slot for row in given.admitted)
        assert {*given.fold_rows.tolist()} | {row.row for row in given.admitted} >= {*given.decode_rows.tolist()}
        runner.execute(runner.prepare(given)).result()
    prefill(runner, driver, 64)
    while min(map(len, said(driver))) < STEPS:
        run(runner, driver, driver.plan(decode=(2, 0, 1)))
    assert said(driver) == expected
