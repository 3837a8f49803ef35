"""The requests that other people's clients send, in their shapes and types, replayed against the real server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.wire import Server, Tensor, batched, plain

pytestmark = pytest.mark.e2e

QUESTION = "What is 17 + 25?"


def one(name: str, dtype: str, value: object) -> Tensor:
    return Tensor(name, dtype, [[value]])


@pytest.mark.parametrize("stream", [True, False])
def test_shapes_of_the_outputs(server: Server, stream: bool) -> None:
    """Clients of both backends decode `text_output[0]`; TensorRT-LLM's read its other outputs as `[0][0]`, and vllm's
    have one dimension."""
    asked = {
        "text_input": QUESTION,
        "max_tokens": 8,
        "stream": stream,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_cumulative_logprob": True,
    }
    for chunk in server.stream([*batched(**asked, return_log_probs=True, return_perf_metrics=True)]):
        assert chunk.shapes.pop("text_output") == (1,)
        assert chunk.shapes.pop("output_log_probs")[:2] == (1, 1)
        assert set(chunk.shapes.values()) == {(1, 1)}, chunk.shapes
    del asked["max_tokens"]
    for chunk in server.stream(plain(**asked, sampling_parameters='{"max_tokens": 8}'), model="vllm_model"):
        assert chunk.outputs
        assert set(chunk.shapes.values()) == {(1,)}, chunk.shapes


def test_several_texts_of_one_response_have_one_dimension(server: Server) -> None:
    asked = {"text_input": QUESTION, "max_tokens": 8}
    (chunk,) = server.stream(batched(**asked, num_return_sequences=3))
    assert chunk.shapes["text_output"] == (3,)
    (chunk,) = server.stream(plain(text_input=QUESTION, sampling_parameters='{"n": 3}'), model="vllm_model")
    assert chunk.shapes["text_output"] == (3,)


@pytest.mark.parametrize("stream", [True, False])
def test_llama_index(server: Server, stream: bool) -> None:
    """Every field, top_p 0 for "not set", random_seed; ends by the final flag and hangs if that comes alone."""
    tensors = [
        one("text_input", "BYTES", QUESTION),
        one("max_tokens", "INT32", 100),
        one("stream", "BOOL", stream),
        one("beam_width", "INT32", 1),
        one("temperature", "FP32", 0.0),
        one("top_k", "INT32", 1),
        one("top_p", "FP32", 0.0),
        one("length_penalty", "FP32", 1.0),
        one("repetition_penalty", "FP32", 1.0),
        one("random_seed", "UINT64", 0),
    ]
    chunks = list(server.stream(tensors, request_id="1234567"))
    assert chunks[-1].final
    assert {chunk.shapes["text_output"] for chunk in chunks} == {(1,)}
    assert "42" in "".join(chunk.text for chunk in chunks)
    assert len(chunks) == 1 or stream


@pytest.mark.parametrize("stream", [True, False])
def test_tensorrt_llm_end_to_end_client(server: Server, stream: bool) -> None:
    """exclude_input_in_output is always false; lists have shape [1, n]; many outputs are named."""
    tensors = batched(
        text_input=QUESTION,
        max_tokens=32,
        bad_words=[""],
        stop_words=[""],
        stream=stream,
        beam_width=1,
        temperature=1.0,
        exclude_input_in_output=False,
        return_log_probs=True,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        top_k=1,
    )
    chunks = list(server.stream(tensors))
    assert not chunks[-1].error
    text = "".join(chunk.text for chunk in chunks)
    assert text.startswith(QUESTION) != stream
    assert "42" in text.removeprefix(QUESTION)
    assert len(chunks[-1].outputs["cum_log_probs"]) == 1
    assert chunks[-1].outputs["cum_log_probs"][0] == pytest.approx(
        sum(chunks[-1].outputs["output_log_probs"]), abs=1e-3
    )


def test_tensorrt_llm_performance_metrics(server: Server) -> None:
    chunk = next(server.stream(batched(text_input=QUESTION, max_tokens=8, return_perf_metrics=True)))
    outputs = {name: values[0] for name, values in chunk.outputs.items()}
    blocks = outputs["kv_cache_alloc_new_blocks"] + outputs["kv_cache_reused_blocks"]
    assert blocks == outputs["kv_cache_alloc_total_blocks"] > 0
    assert outputs["arrival_time_ns"] < outputs["first_token_time_ns"] < outputs["last_token_time_ns"]


def test_openai_frontend(server: Server) -> None:
    """Both counts with every request, zero penalties, stop words in a list; usage is the sum over the chunks."""
    tensors = [
        one("text_input", "BYTES", QUESTION),
        one("stream", "BOOL", True),
        one("exclude_input_in_output", "BOOL", True),
        one("max_tokens", "INT32", 32),
        one("temperature", "FP32", 0.7),
        one("top_p", "FP32", 1.0),
        one("frequency_penalty", "FP32", 0.0),
        one("presence_penalty", "FP32", 0.0),
        one("seed", "UINT64", 5),
        Tensor("stop_words", "BYTES", [["###", "User:"]]),
        one("return_num_input_tokens", "BOOL", True),
        one("return_num_output_tokens", "BOOL", True),
    ]
    chunks = list(server.stream(tensors))
    assert all(len(chunk.outputs["text_output"]) == 1 for chunk in chunks)
    assert sum(chunk.outputs["num_output_tokens"][0] for chunk in chunks) > 0


def test_openai_frontend_in_vllm_style(server: Server) -> None:
    sampling = json.dumps({"max_tokens": 32, "temperature": 0.0, "stop": [], "seed": None, "logprobs": 1})
    tensors = plain(
        text_input=QUESTION,
        stream=True,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_logprobs=True,
        sampling_parameters=sampling,
    )
    chunks = list(server.stream(tensors, model="vllm_model"))
    assert "42" in "".join(chunk.text for chunk in chunks)
    positions = [position for chunk in chunks for position in json.loads(chunk.outputs["logprobs"][0])]
    assert len(positions) == sum(chunk.outputs["num_output_tokens"][0] for chunk in chunks)


def test_vllm_client_asks_for_log_probabilities_that_are_none(server: Server) -> None:
    tensors = plain(text_input=QUESTION, stream=False, return_logprobs=True, sampling_parameters="{}")
    (chunk,) = server.stream(tensors, model="vllm_model")
    assert chunk.outputs["logprobs"] == ["null"]


def test_genai_perf_sends_numbers_as_strings(server: Server) -> None:
    sampling = json.dumps({"max_tokens": "6", "min_tokens": "6", "ignore_eos": "true"})
    _, answer = server.generate(
        "vllm_model", text_input=QUESTION, sampling_parameters=sampling, return_num_output_tokens=True
    )
    assert answer["num_output_tokens"] == 6


def test_perf_analyzer_with_deterministic_tokens(server: Server) -> None:
    tensors = batched(text_input=QUESTION, max_tokens=6, min_length=6, stream=True, return_num_output_tokens=True)
    chunks = list(server.stream(tensors, enable_empty_final_response=True))
    assert sum(chunk.outputs["num_output_tokens"][0] for chunk in chunks) == 6


def test_litellm(server: Server) -> None:
    body = {"parameters": {"max_tokens": 32, "bad_words": [""], "stop_words": [""]}, "stream": False}
    assert "42" in server.text(text_input=QUESTION, **body)


def test_a_stop_request_for_another_model_family_is_refused(server: Server) -> None:
    tensors = [
        Tensor("input_ids", "INT32", [[0]]),
        Tensor("input_lengths", "INT32", [[1]]),
        Tensor("request_output_len", "UINT32", [[1]]),
        one("stop", "BOOL", True),
    ]
    assert list(server.stream(tensors))[-1].error
    assert "42" in server.text(text_input=QUESTION, max_tokens=32)


def test_requests_without_an_id_or_with_the_same_one_do_not_mix(server: Server) -> None:
    questions = [f"What is {n} + {n}?" for n in range(11, 19)]
    streams = [server.stream(batched(text_input=q, max_tokens=32, stream=True), request_id="same") for q in questions]
    texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert [str(2 * n) in text for n, text in zip(range(11, 19), texts, strict=True)] == [True] * 8


def ids(values: list[int], **others: Any) -> list[Tensor]:
    """A request with token ids."""
    return [Tensor("input_ids", "INT32", [values]), Tensor("request_output_len", "INT32", [[4]]), *batched(**others)]


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (ids([1, -1]), "input_ids"),
        (ids([1, 2**31 - 1]), "input_ids"),
        (ids([5] * 4096), "4095"),
        (ids([1, 2], input_lengths=3), "input_lengths"),
        (ids([1, 2], beam_width=2), "beam_width"),
        (ids([1, 2], stop=True), "stop is true and the request has no id"),
        (ids([1, 2], draft_input_ids=[3]), "draft_input_ids is not served"),
        (ids([1, 2], runtime_top_p=3.0), "runtime_top_p"),
        (batched(request_output_len=4), "missing"),
        ([Tensor("input_ids", "INT32", [[1]]), Tensor("request_output_len", "UINT32", [[4]])], "UINT32"),
    ],
    ids=range(10),
)
def test_wrong_token_ids_are_named(server: Server, tensors: list[Tensor], named: str) -> None:
    (chunk,) = server.stream(tensors, model="tensorrt_llm")
    assert named in chunk.error


def test_a_stop_request_for_nobody_ends_by_itself(server: Server) -> None:
    (chunk,) = server.stream(
        ids([1], stop=True), model="tensorrt_llm", request_id="nobody", enable_empty_final_response=True
    )
    assert (chunk.error, chunk.outputs, chunk.final) == ("", {}, True)


def test_several_sequences_of_token_ids(server: Server) -> None:
    found: dict[int, list[int]] = {}
    for chunk in server.stream(ids([5, 6, 7], num_return_sequences=3, streaming=True), model="tensorrt_llm"):
        found.setdefault(chunk.outputs["sequence_index"][0], []).extend(chunk.outputs["output_ids"])
    whole = {
        chunk.outputs["sequence_index"][0]: chunk.outputs["output_ids"]
        for chunk in server.stream(ids([5, 6, 7], num_return_sequences=3), model="tensorrt_llm")
    }
    assert {index: [5, 6, 7, *tokens] for index, tokens in found.items()} == whole
    assert set(whole) == {0, 1, 2}
