"""Wrong requests: a status, a message that names the field, and no harm to anybody else."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc as grpcclient

from tests.e2e.conftest import RunningServer
from tests.e2e.wire import HOSTILE_BODIES, GrpcStream, Server, Tensor, batched, post_raw

pytestmark = pytest.mark.e2e

QUESTION = {"text_input": "What is 1 + 1?", "max_tokens": 8}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e30),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("presence_penalty", 9.0),
        ("beam_width", 4),
        ("num_return_sequences", 0),
        ("num_return_sequences", 1000),
        ("num_logprobs", 1000),
        ("stop_token_ids", [1 << 30]),
        ("stop_words", [f"stop {n}" for n in range(100)]),
        ("logit_bias", "{"),
        ("logit_bias", '{"a": 1}'),
        ("priority", -1),
        ("guided_decoding_guide_type", "poem"),
        ("sampling_parameters", "not json"),
        ("sampling_parameters", '{"temperature": "warm"}'),
        ("sampling_parameters", '{"no_such_field": 1}'),
        ("sampling_parameters", "[1]"),
        ("chat_template_kwargs", "7"),
        ("chat_template_kwargs", '{"chat_template": "{{ 1 }}"}'),
        ("timeout", -5),
        ("timeout", True),
        ("lora_task_id", 3),
        ("decoder_text_input", "x"),
        ("return_context_logits", True),
        ("image", ["aGk="]),
        ("no_such_field", 1),
    ],
)
def test_the_message_names_the_field(server: Server, field: str, value: Any) -> None:
    status, answer = server.generate(**{**QUESTION, field: value})
    assert status == 400, answer
    name = next(iter(json.loads(value))) if value.__class__ is str and value.startswith('{"') else field
    assert field in answer["error"] or name in answer["error"], answer


@pytest.mark.parametrize(
    "messages",
    [
        "",
        "[]",
        "{}",
        "7",
        "[1]",
        '[{"content": "x"}]',
        '[{"role": 3, "content": "x"}]',
        "[" * 100_000,
        '[{"role":',
    ],
)
def test_messages_that_are_none(server: Server, messages: str) -> None:
    status, answer = server.generate(messages=messages, max_tokens=4)
    assert status == 400
    assert "messages" in answer["error"]


@pytest.mark.parametrize("kind", HOSTILE_BODIES)
def test_no_body_overflows_the_stack(server: Server, kind: str) -> None:
    with server.open_stream(text_input="Count from 1 to 120.", max_tokens=600, temperature=0) as stream:
        assert post_raw(server.http, "/v2/models/ensemble/generate", *HOSTILE_BODIES[kind]).startswith(b"HTTP/1.1 ")
        arrived = b""
        while not arrived.endswith(b"0\r\n\r\n"):
            piece = stream.recv(65536)
            assert piece, "the stream beside it broke off"
            arrived += piece
    assert b'"error"' not in arrived
    assert server.text(text_input="What is 17 + 25?", max_tokens=16, temperature=0) == "17 + 25 = 42."


def test_exactly_one_prompt(server: Server) -> None:
    status, answer = server.generate(max_tokens=4)
    assert (status, "text_input" in answer["error"]) == (400, True)
    messages = json.dumps([{"role": "user", "content": "x"}])
    status, answer = server.generate(text_input="x", messages=messages)
    assert (status, "messages" in answer["error"]) == (400, True)


def test_a_prompt_that_is_too_long(server: Server) -> None:
    status, answer = server.generate(text_input="a b " * 5000, max_tokens=4)
    assert status == 400
    assert "text_input" in answer["error"]
    assert "4095" in answer["error"]
    status, answer = server.generate(text_input="a" * 2_000_000, max_tokens=4)
    assert status == 400
    assert "text_input" in answer["error"]


def test_a_prompt_that_leaves_little_room_is_served(server: Server) -> None:
    _, answer = server.generate(
        text_input="1 " * 1900, max_tokens=4000, apply_chat_template=False, ignore_eos=True, return_finish_reason=True,
        return_num_input_tokens=True, return_num_output_tokens=True,
    )  # fmt: skip
    assert answer["finish_reason"] == "length"
    assert answer["num_input_tokens"] + answer["num_output_tokens"] == 4096


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(server: Server, value: float) -> None:
    chunks = list(server.stream(batched(text_input="x", temperature=value)))
    assert "temperature" in chunks[-1].error


def test_a_grpc_error_has_its_code(tmp_path: Path) -> None:
    # A server of its own: one stream with such an error can end tritonserver 2.51 a moment later (docs/operations.md).
    with RunningServer(tmp_path, {"runner": "null"}) as server, GrpcStream(server, with_codes=True) as stream:
        stream.send(batched(text_input="x", top_p=7.0))
        assert "INVALID_ARGUMENT" in stream.receive().error


@pytest.mark.parametrize("timeout_us", [None, 8000, 60000])
def test_a_stream_without_its_text_says_what_is_missing(null_server: Server, timeout_us: int | None) -> None:
    with GrpcStream(null_server) as stream:
        tensors = batched(text_input="x", stream=True, max_tokens=1000, return_finish_reason=True)
        stream.send(tensors, outputs=[grpcclient.InferRequestedOutput("finish_reason")], timeout=timeout_us)
        answers = list(stream.answers())
    too_late = timeout_us is not None and len(answers) == 1  # for a first token, on a machine that is busy
    assert ("timeout" if too_late else "text_output") in answers[-1].error


def test_a_negative_timeout_is_refused_over_grpc_too(server: Server) -> None:
    with GrpcStream(server) as stream:
        stream.send(batched(text_input="x"), timeout=-5)
        assert "timeout is" in list(stream.answers())[-1].error


def test_a_batch_of_two_is_refused(server: Server) -> None:
    chunks = list(server.stream([Tensor("text_input", "BYTES", [["a"], ["b"]])]))
    assert "batch" in chunks[-1].error


def test_a_wrong_stream_request_has_its_status_too(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.events(text_input="x", top_p=7.0)
    assert caught.value.code == 400
    assert "top_p" in caught.value.read().decode()


def test_wrong_requests_leave_others_alone(server: Server) -> None:
    expected = server.text(text_input="Count from 1 to 40.", max_tokens=300, temperature=0.0)
    stream = server.stream(batched(text_input="Count from 1 to 40.", max_tokens=300, stream=True, temperature=0.0))
    text = next(stream).text
    for _ in range(20):
        assert server.generate(text_input="x", temperature=-1.0)[0] == 400
    assert text + "".join(chunk.text for chunk in stream) == expected
