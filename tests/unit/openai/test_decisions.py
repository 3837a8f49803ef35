"""What is asked of the model for a question, and what its probabilities say."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl_backend.openai.decisions import MAX_TEXT, LetteredQuestion, answers_of, to_fields
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.decisions import DecisionRequest

PREDICATE = {"type": "predicate", "name": "late", "instructions": "Was it late?"}


def request(*questions: dict[str, Any], text: Any = "An input.") -> DecisionRequest:
    return DecisionRequest.model_validate({"input": text, "questions": list(questions)})


def row(*shares: float) -> bytes:
    return struct.pack(f"<{len(shares)}f", *map(math.log, shares))


def test_questions_have_the_input_in_common() -> None:
    levels = [{"label": "low"}, {"label": "high", "description": "a lot"}]
    body = request(PREDICATE, {"type": "score", "instructions": "How much?", "levels": levels})
    asked = to_fields(body, [LetteredQuestion(one) for one in body.questions])
    contents = [messages[-1]["content"] for messages in asked["messages"]]
    assert contents[0] == "An input.\n\nWas it late?\nAnswer yes or no."
    assert contents[1].startswith("An input.\n\nHow much?\nA) low\nB) high: a lot\n")
    assert [list(words) for words in asked["choices"]] == [["yes", "no"], ["A", "B"]]
    assert asked["suffixes"] == ["", ""]


def test_a_long_input_is_not_repeated_without_bound() -> None:
    body = request(*[PREDICATE] * 10, text="x" * (MAX_TEXT // 10 + 1))
    with pytest.raises(ApiError, match="10 prompts"):
        to_fields(body, [LetteredQuestion(one) for one in body.questions])


def testanswers_of() -> None:
    choices = [{"value": "true"}, {"value": True}, {"value": "x"}]
    levels = [{"label": "low"}, {"label": "middle"}, {"label": "high"}]
    body = request(
        PREDICATE,
        {"type": "choice", "instructions": "Which?", "choices": choices},
        {"type": "score", "instructions": "How much?", "levels": levels},
    )
    # A row may be wider than its question, and its words are not all that the model could say.
    rows = [row(0.06, 0.02, 1.0), row(0.1, 0.3, 0.1), row(0.1, 0.1, 0.2)]
    predicate, choice, score = answers_of([LetteredQuestion(one) for one in body.questions], rows)
    assert predicate == {"type": "predicate", "name": "late", "probability": pytest.approx(0.75)}
    assert (choice["choice"], choice["confidence"]) == (True, pytest.approx(0.6))
    assert [one["value"] for one in choice["probabilities"]] == ["true", True, "x"]
    assert score["score"] == pytest.approx(0.25 + 2 * 0.5)
    assert [(one["value"], one["label"]) for one in score["probabilities"]] == [(0, "low"), (1, "middle"), (2, "high")]


def test_more_options_than_letters() -> None:
    """The first letter's probability times the second's, each group asked for behind its own letter."""
    choices = [{"value": f"n{index}"} for index in range(30)]
    body = request({"type": "choice", "instructions": "Which?", "choices": choices})
    question = LetteredQuestion(body.questions[0])
    assert (question.labels[0], question.labels[25], question.labels[29]) == ("AA", "AZ", "BD")
    assert (question.suffixes, [len(words) for words in question.words]) == (["", "A", "B"], [2, 26, 4])
    (answer,) = answers_of([question], [row(0.25, 0.75), row(*[1 / 26] * 26), row(0.1, 0.2, 0.3, 0.4)])
    assert (answer["choice"], answer["confidence"]) == ("n29", pytest.approx(0.3))
    assert sum(one["probability"] for one in answer["probabilities"]) == pytest.approx(1.0)


def test_a_transcript() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_json", "data": {"a": 1}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ]
    assert request(PREDICATE, text=items).text == 'user: Hi\n{"a": 1}\n\nassistant: Hello\n\n[call] f {}\n\n[output] 3'
    assert request(PREDICATE, text=[{"content": "Hi"}]).text == "Hi"


@pytest.mark.parametrize(
    "wrong",
    [
        {"questions": []},
        {"questions": [{"type": "box", "instructions": "Where?"}]},
        {"questions": [{"type": "choice", "instructions": "Which?", "choices": [{"value": "x"}]}]},
        {"questions": [{"type": "choice", "instructions": "Which?", "choices": [{"value": "x"}] * 2}]},
        {"questions": [{**PREDICATE, "instructions": " "}]},
        {"input": " "},
        {"input": [{"content": [{"type": "input_image", "image_url": "data:"}]}]},
    ],
)
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, ApiError)):
        DecisionRequest.model_validate({"input": "x", "questions": [PREDICATE], **wrong}).check()
