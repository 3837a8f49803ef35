"""Chunks to outputs: only what was asked, in the forms that clients read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from minisgl_backend.engine.messages import TokenLogprobs
from minisgl_backend.request import FinishReason
from minisgl_backend.serving.answers import AnswerEncoder, StreamError
from minisgl_backend.serving.wire import Chunk, OutputOptions, Part
from minisgl_backend.text.vocabulary import Vocabulary

LENGTH, STOP = int(FinishReason.LENGTH), int(FinishReason.STOP)


@pytest.fixture
def answers() -> AnswerEncoder:
    table = [bytes([i]) for i in range(256)]
    return AnswerEncoder(Vocabulary(lambda ids, skip: bytes(ids).decode(), table, frozenset(), byte_exact=True))


def part(text: bytes, reason: int = 0, **fields: Any) -> Part:
    return Part(token_ids=np.frombuffer(text, np.uint8).astype("<i4").tobytes(), reason=reason, **fields)


def plain(arrays: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, array in arrays.items():
        assert array.shape[0] == 1, name
        found[name] = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return found


def test_only_the_text_when_nothing_else_was_asked(answers: AnswerEncoder) -> None:
    options = OutputOptions(stream=True)
    first = plain(answers.encode(Chunk(uid=1, number=1, parts=(part("é".encode()[:1]),), options=options)))
    last = plain(answers.encode(Chunk(uid=1, number=2, parts=(part("é".encode()[1:], LENGTH),))))
    assert (first, last) == ({"text_output": [""]}, {"text_output": ["é"]})
    assert len(answers) == 0


def test_all_that_can_be_asked(answers: AnswerEncoder) -> None:
    options = OutputOptions(
        finish_reason=True, cumulative_logprob=True, logprobs=True, num_input_tokens=True, num_output_tokens=True,
        log_probs=True, prompt="Q:",
    )  # fmt: skip
    entry = TokenLogprobs(token_id=65, logprob=-0.25, rank=2, top_ids=(66,), top=(-0.125,))
    whole = part(b"A\x02", STOP, ends_with_stop_token=True, logprobs=(entry,), cumulative_logprob=-0.25)
    found = plain(answers.encode(Chunk(uid=1, number=1, parts=(whole,), options=options, num_input_tokens=3)))
    logprobs = json.loads(found.pop("logprobs")[0])
    assert logprobs == [
        {
            "66": {"logprob": -0.125, "rank": 1, "decoded_token": "B"},
            "65": {"logprob": -0.25, "rank": 2, "decoded_token": "A"},
        }
    ]
    assert found == {
        "text_output": ["Q:A"],
        "finish_reason": ["stop"],
        "num_input_tokens": [3],
        "num_output_tokens": [2],
        "cumulative_logprob": [-0.25],
        "cum_log_probs": [-0.25],
        "output_log_probs": [-0.25],
    }


def test_several_sequences(answers: AnswerEncoder) -> None:
    options = OutputOptions(finish_reason=True)
    parts = (part(b"a", STOP), part(b"b", LENGTH, index=1))
    found = plain(answers.encode(Chunk(uid=1, number=1, parts=parts, options=options, num_sequences=2)))
    assert found == {"text_output": ["a", "b"], "finish_reason": ["stop", "length"]}
    streamed = Chunk(uid=8, number=1, parts=(part(b"x", index=1),), options=OutputOptions(stream=True), num_sequences=2)
    assert plain(answers.encode(streamed)) == {"text_output": ["x"], "sequence_index": [1]}


def test_streams_do_not_mix(answers: AnswerEncoder) -> None:
    options = OutputOptions(stream=True)
    pieces = {1: "🎉".encode(), 2: "日".encode()}
    texts = {1: "", 2: ""}
    for number in range(1, 5):
        for uid, data in pieces.items():
            if number <= len(data):
                started = options if number == 1 else None
                chunk = Chunk(uid=uid, number=number, parts=(part(data[number - 1 : number]),), options=started)
                texts[uid] += plain(answers.encode(chunk))["text_output"][0]
    assert texts == {1: "🎉", 2: "日"}


def test_a_failure_and_a_lost_chunk_are_errors(answers: AnswerEncoder) -> None:
    answers.encode(Chunk(uid=1, number=1, parts=(part(b"a"),), options=OutputOptions(stream=True)))
    with pytest.raises(StreamError, match="out of memory") as caught:
        answers.encode(Chunk(uid=1, number=2, failure=("INTERNAL", "out of memory"), forget=(1,)))
    assert caught.value.status == "INTERNAL"
    assert len(answers) == 0
    with pytest.raises(StreamError, match="restarted"):
        answers.encode(Chunk(uid=5, number=4, parts=(part(b"a"),)))
    assert plain(answers.encode(Chunk(uid=9, number=1))) == {"text_output": [""]}
