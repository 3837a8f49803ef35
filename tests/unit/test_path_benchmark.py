"""The path benchmark finds what is wrong with an answer."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

from benchmarks.path_answers import Answer, NullAnswers, Question  # noqa: E402
from benchmarks.path_client import Exchange  # noqa: E402

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "engine" / "demo_model"
STEP_S = 0.01
DELAY_S = 0.003
START = 1000.0


@pytest.fixture(scope="module")
def answers() -> NullAnswers:
    return NullAnswers(str(DEMO))


def response(name: str, text: bytes, count: int, final: bool, prompt: int) -> bytes:
    message = service_pb2.ModelStreamInferResponse()
    infer = message.infer_response
    infer.id = name
    infer.parameters["triton_final_response"].bool_param = final
    values = {
        "text_output": ("BYTES", struct.pack("<I", len(text)) + text),
        "num_output_tokens": ("INT32", struct.pack("<i", count)),
        "num_input_tokens": ("INT32", struct.pack("<i", prompt)),
        "finish_reason": ("BYTES", b"\x06\0\0\0length" if final else b"\x04\0\0\0None"),
    }
    if final:
        stamp = START + STEP_S / 2 + time.time() - time.monotonic()
        values["first_token_time_ns"] = ("INT64", struct.pack("<q", int(stamp * 1e9)))
    for output, (datatype, raw) in values.items():
        infer.outputs.add(name=output, datatype=datatype, shape=[1, 1])
        infer.raw_output_contents.append(raw)
    return bytes(message.SerializeToString())


def answered(answers: NullAnswers, change: Callable[[list[bytes]], None] = lambda texts: None) -> Answer:
    """Five tokens, one a response, each 3 ms after its step; sent in pieces that fit no message."""
    question = Question(answers, "Stream 1 2", 5, usage=True)
    prompt = answers.num_prompt_tokens("Stream 1 2")
    text, ends = answers.answer(prompt, 5)
    texts = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    change(texts)
    exchange = Exchange(slot=0, request=b"", sent=START - 0.1, done=START + 1)
    for step, piece in enumerate(texts):
        raw = response(question.name, piece, 1, step == len(texts) - 1, prompt)
        framed = b"\0" + struct.pack(">I", len(raw)) + raw
        moment = START + STEP_S * step + DELAY_S
        exchange.received += [(moment - 0.001, framed[:3]), (moment, framed[3:])]
    return question.check(exchange, START + STEP_S * np.arange(-3, 20))


def test_a_right_answer(answers: NullAnswers) -> None:
    answer = answered(answers)
    assert answer.faults == []
    assert (answer.num_tokens, answer.num_responses) == (5, 5)
    assert answer.delays == pytest.approx([DELAY_S] * 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda texts: texts.pop(2),
        lambda texts: texts.insert(2, texts[2]),
        lambda texts: texts.reverse(),
        lambda texts: texts.__setitem__(1, b"?"),
    ],
    ids=["lost", "doubled", "out of order", "changed"],
)
def test_a_wrong_text(answers: NullAnswers, change: Callable[[list[bytes]], None]) -> None:
    assert any("text of" in fault for fault in answered(answers, change).faults)


def test_an_error_and_a_stream_without_end(answers: NullAnswers) -> None:
    question = Question(answers, "Stream 1 2", 5, usage=False)
    failed = service_pb2.ModelStreamInferResponse(error_message="no").SerializeToString()
    exchange = Exchange(0, b"", received=[(1.0, b"\0" + struct.pack(">I", len(failed)) + failed)])
    faults = question.check(exchange, np.zeros(0)).faults
    assert any("'no'" in fault for fault in faults)
    assert any("never ended" in fault for fault in faults)
