"""The whole engine with states, where rows are preempted, drafts are wrong and siblings share a prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.request import FinishReason
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.step import StepPlan
from tests.gauge.harness import expect_short_answers
from tests.mtp_checkpoints import HYBRIDS, save_mtp_checkpoint
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint, save_tokenizer

NUM_TOKENS = 40
MAX_SEQ_LEN = 160
_GENERATOR = random.Random(11)
SHARED = [_GENERATOR.randrange(3, VOCAB_SIZE) for _ in range(40)]
# The second half of each prompt repeats, so that drafts are proposed from it.
PROMPTS = [
    SHARED[: 5 * index] + 3 * [_GENERATOR.randrange(3, VOCAB_SIZE) for _ in range(7 + index)] for index in range(6)
]
# It might end early, by what never comes: rows are admitted that are preempted later.
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stop": ["no such text"]}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
CASES: dict[str, dict[str, Any]] = {
    "drafts": {"speculative_config": DRAFTS, "num_pages": 200},
    "preempted": {"num_pages": 18, "page_size": 8, "max_prefill_length": 32},
    "preempted drafts": {"speculative_config": DRAFTS, "num_pages": 18, "page_size": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_5", made)
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model, answers = reference_model(folder), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
            with torch.inference_mode():
                tokens.append(int(model(ids, use_cache=False, position_ids=positions).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "preempted drafts" else pytest.mark.full) for case in CASES]
)
def test_answers_are_those_of_one_prompt_alone(case: str, folder: Path, expected: list[list[int]]) -> None:
    options = {"page_size": 16, "max_running_requests": 5, **CASES[case]}
    with LLM(str(folder), dtype="float32", max_seq_len_override=MAX_SEQ_LEN, **options) as llm:
        expect_short_answers(llm)
        for n in (1, 3):
            outputs = llm.generate(PROMPTS, **GREEDY, n=n)
            found = [[one.token_ids for one in output.completions] for output in outputs]
            assert found == [[answer] * n for answer in expected]
        assert (llm.stats.total_preempted > 0) == ("preempted" in case)


@pytest.mark.parametrize("case", [pytest.param("preempted", marks=pytest.mark.full), "preempted drafts"])
def test_what_free_slots_hold_changes_nothing(
    case: str, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each step all slots are no numbers that are neither a row's nor cached, and so are tails without a row."""
    options = {"page_size": 16, "max_running_requests": 5, "num_state_slots": 9, **CASES[case]}
    poisoned: set[int] = set()
    prepare = ModelRunner.prepare

    with LLM(str(folder), dtype="float32", max_seq_len_override=MAX_SEQ_LEN, **options) as llm:
        expect_short_answers(llm)
        running: Any = llm.engine.core._scheduler._running  # type: ignore[attr-defined]

        def poison_and_prepare(runner: ModelRunner, plan: StepPlan) -> Any:
            slots, rows = running.kv.states._slots, running.rows
            free = slots._pool.free_pages().tolist()
            idle = [row for row, sequence in enumerate(rows.sequences) if sequence is None]
            poisoned.update(free)
            assert runner._states is not None
            for stack in runner._states.pool.stacks:
                for tensor in stack[:2]:
                    tensor[:, free] = torch.nan
                for tensor in stack[2:]:
                    tensor[:, idle] = torch.nan
            return prepare(runner, plan)

        monkeypatch.setattr(ModelRunner, "prepare", poison_and_prepare)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, **GREEDY)
            assert [output.token_ids for output in outputs] == expected
        assert len(poisoned) > 5
        assert llm.stats.total_preempted > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe"])
def test_every_family_answers_alike_however_it_is_run(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    save_tokenizer(tmp_path)
    limits: dict[str, Any] = {"dtype": "float32", "max_seq_len_override": MAX_SEQ_LEN, "max_running_requests": 5}
    with LLM(str(tmp_path), **limits, cache_type="naive") as llm:
        expected = [llm.generate([prompt], **GREEDY)[0].token_ids for prompt in PROMPTS]
    ways = {**CASES, "chunks": {"max_prefill_length": 16, "page_size": 8}, "tp": {"tp": 2, **CASES["preempted"]}}
    for way, options in ways.items():
        with LLM(str(tmp_path), **{**limits, "page_size": 16, **options}) as llm:
            expect_short_answers(llm)
            for n in (1, 2):
                outputs = llm.generate(PROMPTS, **GREEDY, n=n)
                found = [[one.token_ids for one in output.completions] for output in outputs]
                assert found == [[answer] * n for answer in expected], way
            expect_aborts_to_change_nothing(llm, expected)


def expect_aborts_to_change_nothing(llm: LLM, expected: list[list[int]]) -> None:
    """A third of the sequences are given up: before their prompt, and after 7, 14 and 21 tokens."""
    answers = llm._answers(PROMPTS, None, {**GREEDY, "n": 2})
    given_up = [stream for answer in answers for stream in answer.streams][1::3]
    for _ in llm._driver.turns(answers):
        due = [stream.uid for place, stream in enumerate(given_up) if len(stream.token_ids) >= 7 * place]
        llm.engine.core.abort(due, FinishReason.CANCELLED)
    for answer, text in zip(answers, expected, strict=True):
        for stream in answer.streams:
            assert stream.token_ids == text[: len(stream.token_ids)]
            assert stream in given_up or len(stream.token_ids) == NUM_TOKENS
    assert all(7 * place <= len(stream.token_ids) < NUM_TOKENS for place, stream in enumerate(given_up))


@pytest.mark.full
@pytest.mark.parametrize("name", HYBRIDS)
def test_its_own_layers_draft(name: str, tmp_path: Path) -> None:
    """MTP: texts are the same with any number of drafts, for siblings, and where rows are preempted."""
    save_mtp_checkpoint(name, tmp_path)
    save_tokenizer(tmp_path)
    options: dict[str, Any] = {
        "page_size": 8,
        "num_pages": 30,
        "max_running_requests": 4,
        "max_seq_len_override": MAX_SEQ_LEN,
    }
    found = []
    for count in (0, 1, 3):
        drafts: dict[str, Any] = (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}} if count else {}
        )
        with LLM(str(tmp_path), dtype="float32", **options, **drafts) as llm:
            expect_short_answers(llm)
            for n in (1, 2):
                outputs = llm.generate(PROMPTS, **GREEDY, n=n)
                found += [[one.completions[which].token_ids for one in outputs] for which in range(n)]
            assert llm.stats.total_preempted > 0
    assert all(one == found[0] for one in found)


@pytest.mark.full
def test_two_ranks_answer_alike(folder: Path, expected: list[list[int]]) -> None:
    with LLM(
        str(folder),
        dtype="float32",
        page_size=8,
        num_pages=22,
        max_running_requests=3,
        tp=2,
        max_seq_len_override=MAX_SEQ_LEN,
    ) as llm:
        expect_short_answers(llm)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, **GREEDY)
            assert [output.token_ids for output in outputs] == expected
