"""`thinking_token_budget`: thoughts end after so many tokens, whatever the model would sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from minisgl_backend.engine.core import EngineCore
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.grammar.thinking_budget import ThinkingBudget
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, ThinkingTags
from minisgl_backend.scheduler.admission import HISTORY
from minisgl_backend.scheduler.scheduler import Scheduler
from tests.fakes import Records, make_request
from tests.unit.engine.test_core import LIMITS, TRIAL
from tests.unit.grammar.test_grammar import Harness, RandomRunner, guided

OPEN, CLOSE, BEHIND = 90, 91, 92
ONE = ThinkingTags(opening=(OPEN,), closing=(CLOSE,))
MANY = ThinkingTags(opening=(80, 81, 82), closing=(70, 71, 70), behind=(60, 61))


def written(
    tags: ThinkingTags, budget: int, tokens: Sequence[int], *, is_open: bool = False, has_grammar: bool = False
) -> list[int]:
    """What comes of a model that samples `tokens` where it is free."""
    prompted = ThinkingTags(opening=tags.opening, closing=tags.closing, behind=tags.behind, is_open=is_open)
    one = ThinkingBudget(prompted, budget, has_grammar=has_grammar)
    found: list[int] = []
    rest = list(tokens)
    while rest or one.forced is not None:
        token = one.forced
        if token is None:
            token = rest.pop(0)
            one.allow_opening(is_new=True)
        one.accept(token)
        found.append(token)
    return found


@pytest.mark.parametrize(
    ("tags", "budget", "tokens", "options", "expected"),
    [
        pytest.param(ONE, 3, [1, 2, 3, 4, 5], {"is_open": True}, [1, 2, 3, CLOSE, 4, 5], id="cut"),
        pytest.param(ONE, 3, [1, 2, CLOSE, 4, 5, 6, 7], {"is_open": True}, [1, 2, CLOSE, 4, 5, 6, 7], id="short"),
        pytest.param(ONE, 0, [1, 2], {"is_open": True}, [CLOSE, 1, 2], id="none at all"),
        pytest.param(ONE, 2, [1, 2, 3, 4], {}, [1, 2, 3, 4], id="no thoughts"),
        pytest.param(ONE, 2, [OPEN, 2, 3, 4], {}, [OPEN, 2, 3, CLOSE, 4], id="opened by the model"),
        pytest.param(ONE, 0, [OPEN, 2], {}, [OPEN, CLOSE, 2], id="opened in vain"),
        pytest.param(ONE, 3, [OPEN, 1, CLOSE, OPEN, 2, 3, 4], {}, [OPEN, 1, CLOSE, OPEN, 2, 3, CLOSE, 4], id="twice"),
        pytest.param(MANY, 2, [80, 81, 82, 1, 2, 3], {}, [80, 81, 82, 1, 2, 70, 71, 70, 60, 61, 3], id="long tags"),
        pytest.param(MANY, 3, [1, 70, 71, 3], {"is_open": True}, [1, 70, 71, 70, 60, 61, 3], id="half written"),
        pytest.param(MANY, 9, [1, 70, 71, 70, 2, 3], {"is_open": True}, [1, 70, 71, 70, 2, 3], id="by itself"),
        pytest.param(
            MANY,
            9,
            [1, 70, 71, 70, 5],
            {"is_open": True, "has_grammar": True},
            [1, 70, 71, 70, 60, 61, 5],
            id="grammar",
        ),
        pytest.param(
            MANY, 2, [80, 1, 2, 5], {"has_grammar": True}, [80, 81, 82, 1, 2, 70, 71, 70, 60, 61, 5], id="may open"
        ),
        pytest.param(
            ONE, 2, [5, OPEN, 6, 7, 8], {"has_grammar": True}, [5, OPEN, 6, 7, 8], id="grammar's from the start"
        ),
    ],
)
def test_the_end_of_thoughts_is_written_in_time(
    tags: ThinkingTags, budget: int, tokens: list[int], options: dict[str, bool], expected: list[int]
) -> None:
    assert written(tags, budget, tokens, **options) == expected


class NoCompilers:
    """Never asked: there is no grammar."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("overlap", [False, True], ids=["sequential", "overlapped"])
def test_every_sequence_has_its_own_budget(overlap: bool) -> None:
    """Beside others, n times, and preempted: pages suffice for a few of them."""
    grammars = GrammarManager(NoCompilers())  # type: ignore[arg-type]
    limits = dataclasses.replace(LIMITS, num_pages=70)
    scheduler, runner = Scheduler(limits, seed=0), RandomRunner(vocab_size=64, seed=1)
    core = EngineCore(scheduler, runner, overlap=overlap, grammars=grammars, health_check_plan=TRIAL)  # type: ignore
    records = Records()
    for _ in range(HISTORY):  # so that too many are admitted
        scheduler._admission.saw_answer(1)
    tags = ThinkingTags(opening=(2,), closing=(1, 0), is_open=True)
    core.submit(make_request(100, [5, 6], max_tokens=60))
    for uid in range(0, 12, 4):
        core.submit(
            make_request(uid, [5, 6, 7], max_tokens=60, n=4, thinking_token_budget=20 + uid, thinking_tags=tags)
        )
    while core.step():
        scheduler.check()
        records.take(core)  # type: ignore[arg-type]
    assert scheduler.stats().total_preempted > 0
    assert set(records.reasons.values()) == {FinishReason.LENGTH}
    for uid in range(12):
        at = 20 + uid - uid % 4
        assert records.tokens[uid][at : at + 2] == [1, 0], uid
        assert 1 not in records.tokens[uid][:at]
    assert len(records.tokens[100]) == 60
    assert grammars._thinking == {}
    core.close()


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.load(find_model_dir("demo"))


@pytest.fixture(scope="module")
def compilers(model: ModelConfig) -> Iterator[GrammarCompilers]:
    pytest.importorskip("xgrammar")
    source = TokenizerSource(str(find_model_dir("demo")), False, model.vocab_size, list(model.eos_token_ids))
    compilers = GrammarCompilers(source)
    yield compilers
    compilers.close()


@pytest.mark.parametrize("is_open", [False, True], ids=["by the model", "by the prompt"])
def test_a_grammar_holds_behind_the_thoughts(model: ModelConfig, compilers: GrammarCompilers, is_open: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(find_model_dir("demo")))
    unused = model.vocab_size - 1  # no token of a text
    harness = Harness(model, compilers, overlap=True)
    tags = ThinkingTags(opening=(unused,), closing=(unused - 1,), is_open=is_open)
    options: dict[str, Any] = {"thinking_token_budget": 7, "thinking_tags": tags}
    for uid in range(20):
        harness.core.submit(guided(uid, "regex", "[0-9]", **options))
    harness.core.submit(guided(50, "json_schema", json.dumps({"const": {"a": 1}})))
    records = harness.run()
    thought = 0
    for uid in range(20):
        tokens = records.tokens[uid]
        assert records.reasons[uid] == FinishReason.STOP
        if unused - 1 in tokens:
            end = tokens.index(unused - 1)
            assert end <= (7 if is_open else 8)
            assert is_open or tokens[0] == unused
            tokens, thought = tokens[end + 1 :], thought + 1
        assert tokenizer.decode(tokens, skip_special_tokens=True).isdigit()
    assert thought == 20 if is_open else 0 < thought < 20
    harness.core.close()
