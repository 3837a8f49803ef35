"""/v1/decisions: probabilities of the whole stack against those of the same prompts in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_backend import LLM
from minisgl_backend.request import PoolingParams
from tests.e2e.openai_stack import Endpoint

pytestmark = pytest.mark.e2e

INPUT = "The parcel came two days late, and its box was torn. " * 8
SYSTEM = "You judge an input. Answer each question with one of its options alone."
PREDICATE = {"type": "predicate", "name": "late", "instructions": "Was it late?"}
CHOICES = [{"value": "happy"}, {"value": "angry", "description": "not at all happy"}, {"value": True}]
CHOICE = {"type": "choice", "instructions": "How does the writer feel?", "choices": CHOICES}
LEVELS = [{"label": "low"}, {"label": "middle"}, {"label": "high"}]
SCORE = {"type": "score", "name": "harm", "instructions": "How much harm was done?", "levels": LEVELS}
MANY = {"type": "choice", "instructions": "Which number?", "choices": [{"value": f"n{index}"} for index in range(60)]}


def test_answers(endpoint: Endpoint) -> None:
    body = {"model": "demo", "input": INPUT, "questions": [PREDICATE, CHOICE, SCORE, MANY]}
    status, answer = endpoint.post("/v1/decisions", body)
    assert status == 200, answer
    predicate, choice, score, many = answer["answers"]
    assert [one["type"] for one in answer["answers"]] == ["predicate", "choice", "score", "choice"]
    assert (predicate["name"], choice["name"], score["name"]) == ("late", None, "harm")
    lines = ["Was it late?\nAnswer yes or no."]
    lines.append("How does the writer feel?\nA) happy\nB) angry: not at all happy\nC) true")
    lines.append("How much harm was done?\nA) low\nB) middle\nC) high")
    lines[1:] = [f"{line}\nAnswer with the letters of one option alone." for line in lines[1:]]
    expected = _shares(lines, [["yes", "no"], ["A", "B", "C"], ["A", "B", "C"]])
    assert predicate["probability"] == pytest.approx(expected[0][0], abs=1e-4)
    assert [one["probability"] for one in choice["probabilities"]] == pytest.approx(expected[1], abs=1e-4)
    assert choice["choice"] == CHOICES[int(np.argmax(expected[1]))]["value"]
    assert choice["confidence"] == pytest.approx(max(expected[1]), abs=1e-4)
    assert [one["value"] for one in choice["probabilities"]] == ["happy", "angry", True]
    assert score["score"] == pytest.approx(expected[2][1] + 2 * expected[2][2], abs=1e-3)
    assert [(one["value"], one["label"]) for one in score["probabilities"]] == [(0, "low"), (1, "middle"), (2, "high")]
    # More options than letters: the chain rule over two of them.
    assert len(many["probabilities"]) == 60
    assert sum(one["probability"] for one in many["probabilities"]) == pytest.approx(1.0, abs=1e-5)
    usage = answer["usage"]
    assert usage["output_tokens"] == 0
    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] // 3, "the input is computed once"


def test_openais_client(endpoint: Endpoint) -> None:
    found = endpoint.client().decisions.create(model="demo", input=INPUT, questions=[PREDICATE, CHOICE, SCORE])
    predicate, choice, score = found.answers
    assert 0 < predicate.probability < 1
    assert choice.choice in [one["value"] for one in CHOICES]
    assert [one.label for one in score.probabilities] == [one["label"] for one in LEVELS]
    assert found.usage.input_tokens > 0


def _shares(lines: list[str], words: list[list[str]]) -> list[list[float]]:
    with LLM("demo", dtype="float32", num_pages=256, page_size=16, max_running_requests=8) as llm:
        found = []
        for line, asked in zip(lines, words, strict=True):
            messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{INPUT}\n\n{line}"}]
            prompt = llm.tokenizer.render(messages, enable_thinking=False)
            ids = tuple(llm.tokenizer.first_token(word) for word in asked)
            params = PoolingParams(kind="token_logprobs", token_ids=ids)
            (output,) = llm._pooled([llm.tokenizer.encode(prompt, add_special_tokens=False)], params)
            weights = np.exp(output.embedding)
            found.append((weights / weights.sum()).tolist())
        return found


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{**CHOICE, "choices": CHOICES[:1]}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": [CHOICES[0], CHOICES[0]]}]}, "questions"),
        ({"questions": [{"type": "box", "instructions": "Where?"}]}, "questions"),
        ({"input": ""}, "input"),
        ({"input": [{"content": [{"type": "input_image", "image_url": "data:"}]}]}, "input"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused(endpoint: Endpoint, changes: dict[str, Any], param: str) -> None:
    status, answer = endpoint.post("/v1/decisions", {"input": INPUT, "questions": [PREDICATE], **changes})
    assert (status, answer["error"]["param"]) == (400, param), answer
