"""Hand-made plans through a real tiny model give what transformers gives, however they are cut into steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made_plans import EVERY_WISH, Driver, say

from minisgl_backend.attention.base import Plan, PrefillInputs, PromptInputs
from minisgl_backend.attention.hybrid import HybridAttention
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.config import TILE_TOKENS
from minisgl_backend.kernels.sampling_layout import SAMPLING_GRAPHS, SEARCHES
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.models.build import attention_spec, build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import Grammar, SamplingParams
from minisgl_backend.runner.async_output import UnsampledStep
from minisgl_backend.runner.compiling import Compilations
from minisgl_backend.runner.cuda_graph import LARGEST_SAMPLING_GRAPH, EagerGraphRunner
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.piecewise import EagerPieces, piece_sizes
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.warm_up import SAMPLED as SAMPLED_AT_START
from minisgl_backend.runner.warm_up import compile_kernels, warm_up, warm_up_plans
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.step import StepPlan, StepResult
from minisgl_backend.tensor_parallel import TensorParallel
from tests.specs import make_pool

CPU = torch.device("cpu")
VOCAB = 160
GREEDY = SamplingParams(temperature=0.0)
GRAMMAR = Grammar(kind="json")
MAX_SEQ_LEN = 128
PROMPTS = [[5, 9, 77, 3], [11] * 17, list(range(40, 73)), [150]]

MakeRunner = Callable[..., ModelRunner]


class PromptGraphs(TorchBackend):
    """Attends to lone prompts by what is in the buffers then, as a captured pass does."""

    num_attended = 0  # by all layers

    @property
    def captures_prompts(self) -> bool:
        return True

    def plan_prompt(self, inputs: PromptInputs) -> Plan:
        return inputs

    def prefill_into(self, q: torch.Tensor, kv: LayerKV, plan: Plan, out: torch.Tensor) -> None:
        if not isinstance(plan, PromptInputs):
            super().prefill_into(q, kv, plan, out)
            return
        self.num_attended += 1
        row = torch.zeros(1, dtype=torch.int32)
        prefill = PrefillInputs(
            cu_seqlens_q=plan.cu_seqlens_q,
            kv_lens=plan.kv_lens,
            rows=row,
            page_table=plan.page_table,
            cu_seqlens_q_host=plan.cu_seqlens_q.numpy(),
            kv_lens_host=plan.kv_lens.numpy(),
            rows_host=row.numpy(),
        )
        num_tokens = int(plan.cu_seqlens_q[1])
        out[:num_tokens] = self.prefill(q[:num_tokens], kv, self.plan_prefill(prefill))


@pytest.fixture
def make_runner(tiny_model_dir: Path) -> MakeRunner:
    config = ModelConfig.load(tiny_model_dir)

    def make(
        page_size: int = 4,
        max_running: int = 6,
        graph_sizes: tuple[int, ...] = (),
        pieces: tuple[int, ...] = (),
        prompt_graphs: bool = False,
        tp: TensorParallel | None = None,
    ) -> ModelRunner:
        model = build_model(config, tiny_model_dir, dtype=torch.float32, device=CPU, max_seq_len=MAX_SEQ_LEN)
        spec = attention_spec(
            config,
            tp_size=1,
            page_size=page_size,
            max_seq_len=MAX_SEQ_LEN,
            max_rows=max_running + 1,
            dtype=torch.float32,
            device=CPU,
        )
        table = RowTable(max_running=max_running, max_seq_len=MAX_SEQ_LEN, page_size=page_size, device=CPU)
        attention = create_attention("torch", "torch", spec)
        if prompt_graphs:
            backends = [PromptGraphs(spec, group) for group in spec.groups]
            attention = HybridAttention(spec, backends, backends)
        runner = ModelRunner(
            model=model,
            attention=attention,
            pool=make_pool(spec, 600 // page_size),
            table=table,
            sampling=SamplingRows(table.max_rows, VOCAB, (2,), MAX_SEQ_LEN, CPU),
            tp=tp,
        )
        if graph_sizes:
            runner.use_graphs(EagerGraphRunner(graph_sizes))
        if pieces:
            runner.use_pieces(EagerPieces(pieces, config.hidden_size))
        return runner

    return make


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[list[int]]:
    """Ten greedy tokens for each prompt, by transformers."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def run(runner: ModelRunner, driver: Driver, plan: StepPlan) -> StepResult:
    result = runner.execute(runner.prepare(plan)).result()
    driver.commit(plan, result.token_ids)
    return result


def generate(
    runner: ModelRunner, prompts: list[list[int]], params: list[SamplingParams], steps: int = 10, page_size: int = 4
) -> list[list[int]]:
    """All prompts in one prefill step, then decode steps of all rows."""
    driver = Driver(page_size)
    for row, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
        driver.admit(row, prompt, wish)
    run(runner, driver, driver.plan(prefill={row: len(prompt) for row, prompt in enumerate(prompts)}))
    for _ in range(steps - 1):
        run(runner, driver, driver.plan(decode=tuple(range(len(prompts)))))
    return [driver.tokens[row][len(prompt) :] for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_greedy_equals_transformers(make_runner: MakeRunner, expected: list[list[int]], page_size: int) -> None:
    answers = generate(make_runner(page_size), PROMPTS, [GREEDY] * 4, page_size=page_size)
    assert answers == expected


def test_padded_static_inputs_change_nothing(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    assert generate(make_runner(graph_sizes=(1, 2, 6)), PROMPTS, [GREEDY] * 4) == expected
    assert generate(make_runner(graph_sizes=(1, 2)), PROMPTS[:1], [GREEDY]) == expected[:1]


@pytest.mark.parametrize("pieces", [(), (8, 64), (8, 16), (21,)])
def test_chunks_and_mixed_steps_change_nothing(
    make_runner: MakeRunner, expected: list[list[int]], pieces: tuple[int, ...]
) -> None:
    """Also in pieces, where some steps are padded, some fit exactly (21 tokens) and some are too large."""
    runner, driver = make_runner(pieces=pieces), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={0: 4}))
    driver.admit(3, PROMPTS[2], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 5}, decode=(0,)))
    driver.admit(1, PROMPTS[1], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 20, 1: 3}, decode=(0,)))
    run(runner, driver, driver.plan(prefill={1: 14, 3: 8}))
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(3, 1)))
    for _ in range(7):
        run(runner, driver, driver.plan(decode=(0,)))
    found = [driver.tokens[row][len(PROMPTS[p]) :] for row, p in ((0, 0), (1, 1), (3, 2))]
    assert found == [expected[0], expected[1], expected[2]]


def test_captured_passes_of_lone_prompts_change_nothing(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    """Padded and not, of other sizes before; a second chunk and a prompt beside a running row go in pieces."""
    runner, driver = make_runner(pieces=(8, 17, 64), prompt_graphs=True), Driver(4)
    backend = runner.attention.backends[0][0]
    taken = []
    for row, lengths in ((2, (20, 13)), (0, (4,)), (1, (17,))):
        driver.admit(row, PROMPTS[row], GREEDY)
        for length in lengths:
            run(runner, driver, driver.plan(prefill={row: length}))
            taken.append(backend.num_attended // 2)
    assert taken == [1, 1, 2, 3]
    driver.admit(3, PROMPTS[3], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 1}, decode=(0,)))
    assert backend.num_attended // 2 == 3
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(0, 1, 2, 3)))
    found = [driver.tokens[row][len(prompt) :] for row, prompt in enumerate(PROMPTS)]
    assert [answer[:10] for answer in found] == expected


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_lone_prompt_takes_over_pages_of_the_prefix_cache(
    make_runner: MakeRunner, expected: list[list[int]], page_size: int
) -> None:
    """The pages of an earlier row, whose first tokens are not computed again."""
    runner, driver = make_runner(page_size, pieces=(8, 64), prompt_graphs=True), Driver(page_size)
    prompt, cached = PROMPTS[2], 32 // page_size * page_size
    driver.admit(0, prompt, GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(prompt)}))
    driver.admit(3, prompt, GREEDY)
    shared = np.arange(1, 1 + cached // page_size, dtype=np.int32)
    driver.computed[3], driver.pages[3] = cached, len(shared)
    plan = driver.plan(prefill={3: len(prompt) - cached})
    plan = dataclasses.replace(
        plan,
        page_rows=np.full(len(shared) + len(plan.page_ids), 3, dtype=np.int32),
        page_columns=np.arange(len(shared) + len(plan.page_ids), dtype=np.int32),
        page_ids=np.concatenate([shared, plan.page_ids]),
    )
    run(runner, driver, plan)
    assert runner.attention.backends[0][0].num_attended // 2 == 2
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(3,)))
    assert driver.tokens[3][len(prompt) :] == expected[2]


def test_lone_prompts_are_sampled_as_in_company(make_runner: MakeRunner) -> None:
    """With penalties, rules, log-probabilities and prompt log-probabilities, which need the hidden states of all."""
    wishes = [*SAMPLED, SamplingParams(temperature=1.0, seed=8, logprobs=3, prompt_logprobs=2)]

    def answers(runner: ModelRunner) -> list[object]:
        found: list[object] = []
        for wish in wishes:
            driver = Driver(4)
            driver.admit(0, PROMPTS[2], wish)
            result = run(runner, driver, driver.plan(prefill={0: len(PROMPTS[2])}))
            answer = [run(runner, driver, driver.plan(decode=(0,))).token_ids.tolist() for _ in range(6)]
            found.append((result.token_ids.tolist(), answer, len(result.logprobs), len(result.prompt_logprobs)))
        return found

    captured = make_runner(pieces=(64,), prompt_graphs=True)
    assert answers(captured) == answers(make_runner(pieces=(64,)))
    assert captured.attention.backends[0][0].num_attended == 2 * len(SAMPLED)


def test_a_chunk_with_nan_is_found_where_it_samples_nothing(make_runner: MakeRunner) -> None:
    runner, driver = make_runner(pieces=(64,), prompt_graphs=True), Driver(4)
    runner._model.model.embed_tokens.weight.data[PROMPTS[2][3]] = torch.nan  # type: ignore[attr-defined]
    driver.admit(0, PROMPTS[2], GREEDY)
    assert run(runner, driver, driver.plan(prefill={0: 20})).failed_rows == {0}


def test_padding_of_pieces_writes_no_page_of_a_step_before(make_runner: MakeRunner) -> None:
    """The slots of the long step would be left in the padding of the short one."""
    runner, driver = make_runner(pieces=(64,)), Driver(4)
    driver.admit(0, PROMPTS[2], GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(PROMPTS[2])}))
    pages = [cache[1:] for layer in (0, 1) for cache in (runner._pool.layer(layer).k, runner._pool.layer(layer).v)]
    before = [cache.clone() for cache in pages]
    taken = driver.next_page - 1
    driver.admit(1, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={1: len(PROMPTS[0])}))
    for cache, kept in zip(pages, before, strict=True):
        assert torch.equal(cache[:taken], kept[:taken])


def test_piece_sizes() -> None:
    assert piece_sizes(0) == ()
    assert piece_sizes(10) == (10,)
    assert piece_sizes(100) == (16, 32, 48, 64, 96, 100)
    assert piece_sizes(512) == (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
    assert piece_sizes(1500)[-6:] == (896, 1024, 1152, 1280, 1408, 1500)
    assert set(range(TILE_TOKENS, 2049, TILE_TOKENS)) <= set(piece_sizes(2048))  # steps that the planner fills
    assert piece_sizes(8448)[-11:] == (1920, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 8448)


@pytest.mark.parametrize(
    ("num_tokens", "fits"),
    [(1, True), (513, True), (2048, True), (2049, False), (2275, False), (2276, True), (2560, True), (8448, True),
     (4097, False), (4552, True), (8449, False)],
)  # fmt: skip
def test_long_steps_are_not_padded_by_much(num_tokens: int, fits: bool) -> None:
    pieces = EagerPieces(piece_sizes(8448), 8)
    assert pieces.fits(num_tokens) == fits
    assert pieces.sparse_sizes[:3] == (2048, 2560, 3072)
    assert EagerPieces(piece_sizes(2048), 8).sparse_sizes == ()


def test_a_runner_that_warmed_up_has_forgotten_it(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner = make_runner(graph_sizes=(1, 6), pieces=(64,))
    warm_up(runner, 6, 100, MAX_SEQ_LEN)
    assert not runner._pool.layer(0).k[1:].any(), "only the padding page was written"
    assert generate(runner, PROMPTS, [GREEDY] * 4) == expected


@pytest.mark.parametrize("is_cached", [True, False])
def test_kernels_are_compiled_with_the_steps_of_a_start(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """Nothing but the first step is executed where the compiler's cache has its kernels."""
    runner, done, executed = make_runner(), Compilations(), []
    done.longest_s = 0.01 if is_cached else 3.0
    prepare = runner.prepare

    def noted(plan: StepPlan) -> object:
        executed.append(plan)
        return prepare(plan)

    monkeypatch.setattr(runner, "prepare", noted)
    monkeypatch.setattr("minisgl_backend.runner.warm_up.compiles_ahead", lambda: True)
    monkeypatch.setattr("minisgl_backend.runner.warm_up.compiling_ahead", lambda: contextlib.nullcontext(done))
    compile_kernels(runner, 6, 100, MAX_SEQ_LEN)
    decoding = {len(plan.decode_rows) for plan in executed if not plan.prefill}
    asked = [plan.admitted[0].params for plan in executed if plan.admitted]
    assert len(executed) == 1 if is_cached else decoding == {1, 2, 4, 6}
    assert is_cached or all(params in asked for params in SAMPLED_AT_START)


@pytest.mark.parametrize(("max_running", "max_prefill", "max_seq_len"), [(1, 1, 2), (2, 16, 64), (256, 8192, 4096)])
def test_warming_up_stays_within_the_limits(max_running: int, max_prefill: int, max_seq_len: int) -> None:
    plans = warm_up_plans(max_running, max_prefill, max_seq_len)
    assert plans
    for plan in plans:
        assert len(plan.prefill[0].token_ids) <= min(max_prefill, max_seq_len - 1)
        assert {0, *plan.decode_rows.tolist()} <= set(range(max_running))
        assert len(plan.admitted) == 1 + len(plan.decode_rows)


@pytest.mark.parametrize(("max_running", "max_seq_len"), [(256, 4096), (4, 128)])
def test_warming_up_reaches_each_number_of_tokens_that_changes_kernels(max_running: int, max_seq_len: int) -> None:
    counts = (65, 257, 410, 615, 2458, 6001)
    plans = warm_up_plans(max_running, 8192, max_seq_len, counts)
    sizes = [sum(len(chunk.token_ids) for chunk in plan.prefill) + len(plan.decode_rows) for plan in plans]
    most = max_running * (max_seq_len - 1)
    for count, following in itertools.pairwise((*counts, 8193)):
        assert count > most or any(count <= size < following for size in sizes), count
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 3, 5, 9} <= set(sizes)


def test_a_step_may_be_launched_before_the_last_one_is_read(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner, driver = make_runner(), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    plan = driver.plan(prefill={0: 4})
    pending = runner.execute(runner.prepare(plan))
    found = []
    for _ in range(9):
        plan = driver.plan(decode=(0,))
        following = runner.execute(runner.prepare(plan))
        found += pending.result().token_ids.tolist()
        pending = following
    found += pending.result().token_ids.tolist()
    assert found == expected[0]


def test_resumption_continues_where_it_stopped(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    """A preempted sequence comes back in another row, with its answer so far as part of what is prefilled."""
    runner, driver = make_runner(), Driver(4)
    so_far = PROMPTS[2] + expected[2][:4]
    driver.admit(5, so_far, GREEDY, prompt_len=len(PROMPTS[2]))
    run(runner, driver, driver.plan(prefill={5: len(so_far)}))
    for _ in range(5):
        run(runner, driver, driver.plan(decode=(5,)))
    assert driver.tokens[5][len(PROMPTS[2]) :] == expected[2]


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2**64 - 1, top_k=12, top_p=0.9),
    SamplingParams(temperature=1.3, seed=3, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=4, top_p=0.7, logit_bias={7: 2.0}, min_tokens=5),
]


def test_a_seed_gives_the_same_text_in_any_company(make_runner: MakeRunner) -> None:
    together = generate(make_runner(), PROMPTS, SAMPLED)
    alone = [generate(make_runner(), [prompt], [wish])[0] for prompt, wish in zip(PROMPTS, SAMPLED, strict=True)]
    padded = generate(make_runner(graph_sizes=(1, 2, 6), pieces=(32, 64)), PROMPTS, SAMPLED)
    assert together == alone == padded


def test_a_seed_survives_preemption_and_another_row(make_runner: MakeRunner) -> None:
    together = generate(make_runner(), PROMPTS, SAMPLED)
    for index, wish in enumerate(SAMPLED):
        runner, driver = make_runner(), Driver(4)
        so_far = PROMPTS[index] + together[index][:4]
        driver.admit(4, so_far, wish, prompt_len=len(PROMPTS[index]))
        run(runner, driver, driver.plan(prefill={4: len(so_far)}))
        for _ in range(5):
            run(runner, driver, driver.plan(decode=(4,)))
        assert driver.tokens[4][len(PROMPTS[index]) :] == together[index]


def test_different_seeds_differ(make_runner: MakeRunner) -> None:
    wishes = [SamplingParams(temperature=1.5, seed=seed) for seed in (0, 1, 2**32, 2**63)]
    answers = generate(make_runner(), [PROMPTS[0]] * 4, wishes)
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.mark.parametrize("pieces", [(), (64,)])
def test_logprobs_equal_transformers(make_runner: MakeRunner, tiny_model_dir: Path, pieces: tuple[int, ...]) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    wish = SamplingParams(temperature=1.0, seed=8, logprobs=3, prompt_logprobs=2)
    runner, driver = make_runner(pieces=pieces), Driver(4)
    prompt = PROMPTS[2]
    driver.admit(0, PROMPTS[0], GREEDY)
    driver.admit(1, prompt, wish)
    first = run(runner, driver, driver.plan(prefill={0: 4, 1: 10}))
    second = run(runner, driver, driver.plan(prefill={1: len(prompt) - 10}, decode=(0,)))
    third = run(runner, driver, driver.plan(decode=(0, 1)))
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([driver.tokens[1]])).logits[0], dim=-1)

    of_prompt = first.prompt_logprobs[1] + second.prompt_logprobs[1]
    assert len(of_prompt) == len(prompt) - 1
    assert not third.prompt_logprobs
    assert set(second.logprobs) == {0}
    assert set(third.logprobs) == {1}
    found = [*of_prompt, second.logprobs[0], third.logprobs[1]]
    for position, (token, entry) in enumerate(zip(driver.tokens[1][1:], found, strict=True)):
        line = expected[position]
        assert entry.logprob == pytest.approx(float(line[token]), abs=1e-4)
        assert entry.rank == int((line > line[token]).sum()) + 1
        top = 2 if position < len(prompt) - 1 else 3
        values, ids = line.topk(top)
        assert entry.top_ids == tuple(ids.tolist())
        assert entry.top == pytest.approx(values.tolist(), abs=1e-4)


def test_a_row_with_nan_fails_alone(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner = make_runner()
    model = runner._model
    logits_of = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        logits[1] = torch.nan
        return logits

    driver = Driver(4)
    for row in (0, 1):
        driver.admit(row, PROMPTS[row], GREEDY)
    model.logits = poisoned  # type: ignore[method-assign]
    result = run(runner, driver, driver.plan(prefill={0: 4, 1: 17}))
    assert result.failed_rows == {1}
    assert result.token_ids[0] == expected[0][0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("graph_sizes", [(), (4,)])
def test_grammar_masks_allow_only_their_tokens(
    make_runner: MakeRunner, graph_sizes: tuple[int, ...], in_place: bool
) -> None:
    runner, driver = make_runner(graph_sizes=graph_sizes), Driver(4)
    for row in (0, 1, 2):
        driver.admit(row, PROMPTS[0], SamplingParams(temperature=2.0, seed=row, grammar=GRAMMAR if row else None))
    plan = driver.plan(prefill={0: 4, 1: 4, 2: 4})
    pending = runner.execute(runner.prepare(plan))
    runner.sample(pending, None)
    driver.commit(plan, pending.result().token_ids)
    bits = runner.mask_lines(2) if in_place else np.empty((2, -(-VOCAB // 32)), dtype=np.int32)
    bits[:] = 0
    bits[0, 33 // 32] = 1 << (33 % 32)
    bits[1, 159 // 32] = np.array(1 << (159 % 32), dtype=np.uint32).astype(np.int32)
    plan = driver.plan(decode=(0, 1, 2))
    pending = runner.execute(runner.prepare(plan))
    assert pending.unsampled is not None
    runner.sample(pending, (np.array([1, 2], dtype=np.int32), bits))
    assert pending.result().token_ids[1:].tolist() == [33, 159]


class NotedGraphs(EagerGraphRunner):
    """Notes the sampling graphs that it replays."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self.replayed: list[tuple[int, int]] = []

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        self.replayed.append((size, sampling_graph))
        super().replay_sampling(size, sampling_graph)


MANY_PROMPTS = [list(range(1 + index, 3 + 2 * index)) for index in range(len(EVERY_WISH))]


def test_captured_sampling_changes_nothing(make_runner: MakeRunner) -> None:
    """Every option alone, in padded batches, and in one that is too large for it."""
    eager, captured, graphs = make_runner(max_running=24), make_runner(max_running=24), NotedGraphs((1, 4, 16, 24))
    captured.use_graphs(graphs)
    assert graphs.sampling_sizes == (1, 4, 16)
    assert LARGEST_SAMPLING_GRAPH == 16
    expected = say(eager, EVERY_WISH, MANY_PROMPTS, 4)
    assert say(captured, EVERY_WISH, MANY_PROMPTS, 4) == expected
    assert not graphs.replayed
    # Batches with masks come before larger ones without: what they leave must mask nobody.
    for size in (1, 3, 13):
        for first in range(len(EVERY_WISH) - size, -1, -max(1, size // 2)):
            part = slice(first, first + size)
            assert say(captured, EVERY_WISH[part], MANY_PROMPTS[part], 4) == expected[part]
    assert {size for size, _ in graphs.replayed} == {1, 4, 16}
    # No search in a vocabulary that fits into one program.
    assert {graph for _, graph in graphs.replayed} == {graph for graph in SAMPLING_GRAPHS if not graph & SEARCHES}


class OtherRank(TensorParallel):
    """Two ranks in one thread: what rank 0 broadcasts is there when rank 1 asks for it."""

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        super().__init__(rank, 2, None, CPU)
        self._sent = sent

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self.rank == source:
            self._sent.append(tensor.clone())
            return tensor
        return tensor.copy_(self._sent.pop(0))


def test_the_other_ranks_make_the_collectives_of_captured_sampling(make_runner: MakeRunner) -> None:
    sent: list[torch.Tensor] = []
    first, second = (make_runner(max_running=24, tp=OtherRank(rank, sent)) for rank in (0, 1))
    graphs = NotedGraphs((4, 24))
    for runner, kind in ((first, NotedGraphs((4, 24))), (second, graphs)):
        runner.use_graphs(kind)
    assert not sent, "both have captured the same ones"
    driver, wishes = Driver(4), [EVERY_WISH[index] for index in (2, 5, 14, 19)]
    for row, wish in enumerate(wishes):
        driver.admit(row, PROMPTS[row], wish)
    plan = driver.plan(prefill={row: len(prompt) for row, prompt in enumerate(PROMPTS)})
    for decode in ((0,), (0, 1), (3,), (1, 2, 3), (0, 1, 2, 3)):
        host = first.build(plan)
        pending = first.execute(first.upload(host))
        if isinstance(pending, UnsampledStep):
            first.sample(pending, first.no_masks(len(plan.sampled_rows)))
        mirrored = second.execute(second.mirror(plan, host.decisions)).result()
        assert mirrored.token_ids.tolist() == pending.result().token_ids.tolist()
        assert not sent
        assert torch.equal(first._table.tokens, second._table.tokens)
        driver.commit(plan, pending.result().token_ids)
        plan = driver.plan(decode=decode)
    assert len(graphs.replayed) == 3, "temperature alone decided one step, and the last one was only planned"


def test_a_plan_without_tokens_is_executed(make_runner: MakeRunner) -> None:
    runner, driver = make_runner(), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    empty = runner.execute(runner.prepare(dataclasses.replace(driver.plan(), step=1))).result()
    assert len(empty.token_ids) == 0
    driver.admit(0, PROMPTS[1], GREEDY)
    assert len(run(runner, driver, driver.plan(prefill={0: 6})).token_ids) == 0
