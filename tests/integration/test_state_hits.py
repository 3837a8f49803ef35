"""Models with states through the whole engine, with default options: how much of prompts that begin alike is found, and
that tokens are those of a model that finds nothing, after failures and evictions, too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.kv.state import StatePool
from minisgl_backend.runner.model_runner import ModelRunner
from tests.hybrid_chats import BEGINNING, save_hybrid, text, words

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slots and tails hold before they are written is no number."""
    make = StatePool.__init__

    def fill(pool: StatePool, *args: Any, **kwargs: Any) -> None:
        make(pool, *args, **kwargs)
        for stack in pool.stacks:
            for tensor in stack:
                tensor.fill_(torch.nan)

    monkeypatch.setattr(StatePool, "__init__", fill)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", cache_type="naive") as llm:
        yield llm


def test_the_third_request_of_a_long_shared_prompt_computes_less_than_a_page_more_than_its_own(
    folder: Path, alone: LLM
) -> None:
    draw = random.Random(0)
    shared = words(draw, 3000)
    prompts = [shared + words(draw, 40) for _ in range(3)]
    with LLM(str(folder), dtype="float32") as llm:
        outputs = [llm.generate([prompt], max_tokens=6, **GREEDY)[0] for prompt in prompts]
        page = llm.engine.core._scheduler._limits.page_size  # type: ignore[attr-defined]
        assert page <= 64
        assert outputs[0].num_cached_tokens == 0
        assert 3000 - page < outputs[2].num_cached_tokens <= 3000
        # Without a single state, and then with what was left since.
        cache = llm.engine.core._scheduler._running.kv._cache  # type: ignore[attr-defined]
        while cache.evict_state(proved=True):
            pass
        again = [llm.generate([prompt], max_tokens=6, **GREEDY)[0] for prompt in prompts[1:]]
        assert again[0].num_cached_tokens == 0
    expected = alone.generate(prompts[1:], max_tokens=6, **GREEDY)
    assert [one.token_ids for one in outputs[1:]] == [one.token_ids for one in expected]
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]


def test_chats_with_one_system_message_find_it_at_once_and_go_on_where_they_were(folder: Path, alone: LLM) -> None:
    draw = random.Random(1)
    system = {"role": "system", "content": text(draw, 300)}
    chats: list[list[dict[str, str]]] = [[system, {"role": "user", "content": text(draw, 30)}] for _ in range(12)]
    with LLM(str(folder), dtype="float32") as llm:
        page = llm.engine.core._scheduler._limits.page_size  # type: ignore[attr-defined]
        first = [llm.chat(chat, max_tokens=20, **GREEDY)[0] for chat in chats]
        assert [one.num_cached_tokens for one in first] == [0, *[300 // page * page] * 11]
        for chat, answer in zip(chats, first, strict=True):
            # Its end alone is rendered again, as if the beginning had been a thought.
            later = "".join(f"w{token} " for token in answer.token_ids[10:])
            chat += [{"role": "assistant", "content": later}, {"role": "user", "content": text(draw, 25)}]
        second = [llm.chat(chat, max_tokens=8, **GREEDY)[0] for chat in chats]
        stable = [len(one.prompt_token_ids) - BEGINNING for one in first]
        found = [one.num_cached_tokens for one in second]
        assert all(least - page < cached for least, cached in zip(stable, found, strict=True)), (stable, found)
        assert llm.stats.states_owned == 0
    expected = alone.chat(chats, max_tokens=8, **GREEDY)
    assert [one.token_ids for one in second] == [one.token_ids for one in expected]


@pytest.mark.parametrize("fails_in", [pytest.param("prepare", marks=pytest.mark.full), "execute"])
def test_a_step_that_is_tried_again_folds_once(
    folder: Path, alone: LLM, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that breaks its steps ends; the rows that decode beside it are computed again in the same step."""
    draw = random.Random(2)
    # The first fold of each follows on the state of its prompt, which the prefix cache keeps, into another slot.
    good, bad = [words(draw, length) for length in (17, 18, 19)], words(draw, 33)
    run = getattr(ModelRunner, fails_in)
    failed = []

    def fail(runner: ModelRunner, given: Any) -> Any:
        plan = given if fails_in == "prepare" else given.step.plan if hasattr(given, "step") else given.host.plan
        found = run(runner, given)
        if any(len(chunk.token_ids) == 33 for chunk in plan.prefill):
            failed.append(plan.step)
            raise RuntimeError("injected behind the folds")
        return found

    with LLM(str(folder), dtype="float32", page_size=4, mixed_prefill_length=64) as llm:
        outputs = []
        stream = llm._answers([*good], None, {"max_tokens": 40, **GREEDY})
        turns = llm._driver.turns(stream)
        monkeypatch.setattr(ModelRunner, fails_in, fail)
        for turn, _ in enumerate(turns):
            if turn < 5 or turn == 12:
                (late,) = llm._answers([bad], None, {"max_tokens": 4, **GREEDY})
                llm.engine.core.submit(late.begin())
        outputs = [answer.output() for answer in stream]
    assert failed
    expected = alone.generate(good, max_tokens=40, **GREEDY)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
