"""A trained model with states (scripts/train_recall_model.py): it recalls over more than ten pages, its own layer
drafts what it says, and a state that is wrong shows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.runner.states import StateTables
from tests.proposers import verify_every_draft

FOLDER = Path(__file__).parents[1] / "recall_model"
MARK, WORDS, NUMBERS, QUESTION, CUE = 1, range(2, 119), range(119, 127), 127, 3
PAGE, LENGTH, RECALLED = 64, 11 * 64, 32
GREEDY: dict[str, Any] = {"max_tokens": RECALLED, "temperature": 0.0, "ignore_eos": True}


def held_out(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that nobody has trained with, each of which asks for what is in its first page, and what that is."""
    draw, prompts, answers = random.Random("held out"), [], []
    for start in range(count):
        words = draw.choices(WORDS, k=LENGTH)
        for at in range(40, 56, 4):
            words[at] = draw.choice(NUMBERS)
        begin = start + CUE
        prompts.append([*words, MARK, *words[start:begin]])
        answers.append(words[begin : begin + RECALLED])
    return prompts, answers


PROMPTS, ANSWERS = held_out(10)


def recall(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, **GREEDY)]


def share_right(found: Sequence[Sequence[int]]) -> float:
    right = [
        one == other for each, its in zip(found, ANSWERS, strict=True) for one, other in zip(each, its, strict=True)
    ]
    return sum(right) / len(right)


@pytest.fixture(scope="module")
def plain() -> Iterator[list[list[int]]]:
    with LLM(str(FOLDER), dtype="float32", page_size=PAGE) as llm:
        yield recall(llm)


def test_it_recalls_over_more_than_ten_pages(plain: list[list[int]]) -> None:
    assert share_right(plain) > 0.9


@pytest.mark.parametrize(("count", "least"), [(1, 1.6), (3, 2.2)])
def test_its_own_layer_drafts_what_it_says(count: int, least: float, plain: list[list[int]]) -> None:
    drafts: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}
    with LLM(str(FOLDER), dtype="float32", page_size=PAGE, **drafts) as llm:
        verify_every_draft(llm, count)
        found, counts = recall(llm), llm.stats.speculation
    assert found == plain
    tokens = sum(map(len, found))
    # Each row's, of which the first has the prompt, and no drafts.
    assert tokens / (tokens - sum(counts.accepted)) > least


def test_a_wrong_state_shows(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what slots hold lost before each step, answers are others: what these tests see of states."""
    apply = StateTables.apply

    def apply_and_lose(tables: StateTables, *given: Any) -> None:
        apply(tables, *given)
        for stack in tables.pool.stacks:
            stack.states.zero_()
            stack.conv.zero_()

    monkeypatch.setattr(StateTables, "apply", apply_and_lose)
    with LLM(str(FOLDER), dtype="float32", page_size=PAGE, max_prefill_length=PAGE, cache_type="naive") as llm:
        found = recall(llm)
    assert found != plain
    assert share_right(found) < share_right(plain) - 0.05
