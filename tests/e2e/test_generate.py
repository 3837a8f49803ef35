"""HTTP `generate` and `generate_stream`, and gRPC streams: the demo model's answers through the ensemble."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from minisgl_backend.host.server_process import ServerProcess
from tests.e2e.wire import Server, Tensor, batched, plain

pytestmark = pytest.mark.e2e

COUNT = "Count from 1 to 60."


def test_one_question_one_answer(server: Server) -> None:
    status, answer = server.generate(text_input="What is 17 + 25?", max_tokens=32)
    assert status == 200
    assert "42" in answer["text_output"]
    assert "What is" not in answer["text_output"]
    assert not {"finish_reason", "num_output_tokens", "logprobs", "context_logits"} & set(answer)


def test_the_supervisor_learns_whether_there_is_a_chat_template(server: Server) -> None:
    supervised = ServerProcess.__new__(ServerProcess)
    supervised.__dict__.update(_settings=SimpleNamespace(address=f"127.0.0.1:{server.http}"), _control_key="")
    assert supervised.has_chat_template()


def test_a_stream_adds_up_to_the_whole_answer(server: Server) -> None:
    whole = server.text(text_input=COUNT, max_tokens=400, temperature=0.0)
    events = server.events(text_input=COUNT, max_tokens=400, temperature=0.0)
    assert len(events) > 20
    assert "".join(event["text_output"] for event in events) == whole
    numbers = [int(word) for word in whole.replace(",", " ").replace(".", " ").split() if word.isdigit()]
    assert numbers == list(range(1, 61))


@pytest.mark.parametrize("words", ["naïve café Zürich", "你好 世界 苹果", "🎉 🚀 👍", "Łódź 水 🍎"])
def test_no_character_breaks(server: Server, words: str) -> None:
    request = {"text_input": f"Repeat: {words}", "max_tokens": 80, "temperature": 0.0}
    events = server.events(**request)
    text = "".join(event["text_output"] for event in events)
    assert text == server.text(**request)
    assert "�" not in text
    assert not any("�" in event["text_output"] for event in events)


def test_raw_text_round_trips(server: Server) -> None:
    text = "Grüße, 世界! 🎉👩‍👩‍👧 \n\t end"
    answer = server.text(text_input=text, apply_chat_template=False, exclude_input_in_output=False, max_tokens=1)
    assert answer.startswith(text)


def test_chat_messages(server: Server) -> None:
    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "What is 100 - 1?"},
    ]
    assert "99" in server.text(messages=json.dumps(messages), max_tokens=32)


def test_messages_and_the_template_on_text_are_the_same(server: Server) -> None:
    question = "What is 11 + 12?"
    messages = json.dumps([{"role": "user", "content": question}])
    assert server.text(messages=messages, max_tokens=32) == server.text(text_input=question, max_tokens=32)


def test_grpc_stream_ends_with_its_last_data(server: Server) -> None:
    chunks = list(
        server.stream(
            batched(
                text_input=COUNT,
                max_tokens=400,
                stream=True,
                return_finish_reason=True,
                return_num_input_tokens=True,
                return_num_output_tokens=True,
            )
        )
    )
    assert not any(chunk.error for chunk in chunks)
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].outputs["finish_reason"] == ["stop"]
    assert {chunk.outputs["finish_reason"][0] for chunk in chunks[:-1]} == {"None"}
    assert len({chunk.outputs["num_input_tokens"][0] for chunk in chunks}) == 1
    text = "".join(chunk.text for chunk in chunks)
    status, whole = server.generate(text_input=COUNT, max_tokens=400, return_num_output_tokens=True)
    assert status == 200
    assert text == whole["text_output"]
    assert sum(chunk.outputs["num_output_tokens"][0] for chunk in chunks) == whole["num_output_tokens"]


def test_the_final_flag_comes_with_data_even_when_empty_ones_are_wanted(server: Server) -> None:
    chunks = list(server.stream(batched(text_input=COUNT, max_tokens=9, stream=True), enable_empty_final_response=True))
    assert chunks[-1].final
    assert "text_output" in chunks[-1].outputs


def test_length_is_a_finish_reason(server: Server) -> None:
    _, answer = server.generate(
        text_input=COUNT, max_tokens=7, return_finish_reason=True, return_num_output_tokens=True
    )
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ("length", 7)


def test_stop_strings_end_the_text_before_them(server: Server) -> None:
    whole = server.text(text_input=COUNT, max_tokens=400)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    expected = whole[: whole.index(stop)]
    request = {"text_input": COUNT, "max_tokens": 400, "stop_words": [stop, ""]}
    assert server.text(**request) == expected
    events = server.events(**request, return_finish_reason=True)
    assert "".join(event["text_output"] for event in events) == expected
    assert events[-1]["finish_reason"] == "stop"
    assert server.text(text_input=COUNT, max_tokens=400, stop=stop, include_stop_str_in_output=True) == expected + stop


def test_the_prompt_in_front_when_asked(server: Server) -> None:
    question = "What is 17 + 25?"
    plain_answer = server.text(text_input=question, max_tokens=32)
    assert server.text(text_input=question, max_tokens=32, exclude_input_in_output=False) == question + plain_answer
    events = server.events(text_input=question, max_tokens=32, exclude_input_in_output=False)
    assert "".join(event["text_output"] for event in events) == plain_answer


def test_several_sequences(server: Server) -> None:
    request = {"text_input": COUNT, "max_tokens": 12, "num_return_sequences": 3, "return_finish_reason": True}
    status, answer = server.generate(**request)
    assert status == 200
    assert len(answer["text_output"]) == 3
    assert answer["finish_reason"] == ["length"] * 3
    texts = {0: "", 1: "", 2: ""}
    chunks = list(server.stream(batched(**request, stream=True)))
    for chunk in chunks:
        texts[chunk.outputs["sequence_index"][0]] += chunk.text
    assert list(texts.values()) == answer["text_output"]
    assert [chunk.final for chunk in chunks].count(True) == 1


def test_a_seed_repeats_a_sample(server: Server) -> None:
    request = {"text_input": "Tell me", "max_tokens": 24, "temperature": 5.0, "ignore_eos": True}
    first = server.text(**request, seed=7)
    assert first == server.text(**request, seed=7)
    assert len({server.text(**request, seed=seed) for seed in range(4)}) > 1


def test_logprobs(server: Server) -> None:
    _, answer = server.generate(
        text_input="What is 17 + 25?", max_tokens=3, logprobs=2, return_cumulative_logprob=True, ignore_eos=True
    )
    positions = json.loads(answer["logprobs"])
    assert len(positions) == 3
    best = [min(position.values(), key=lambda entry: entry["rank"]) for position in positions]
    assert sum(entry["logprob"] for entry in best) == pytest.approx(answer["cumulative_logprob"], abs=1e-3)
    assert "".join(entry["decoded_token"] for entry in best)


def test_the_alias_without_a_batch_dimension(server: Server) -> None:
    question = "What is 17 + 25?"
    sampling = json.dumps({"max_tokens": "32", "temperature": "0", "stop": ["\n\n"]})
    tensors = plain(text_input=question, stream=True, sampling_parameters=sampling)
    text = "".join(chunk.text for chunk in server.stream(tensors, model="vllm_model"))
    assert text == server.text(text_input=question, max_tokens=32)
    assert "42" in server.text("vllm_model", text_input=question, parameters={"max_tokens": "32", "temperature": "0"})


def test_many_at_once_answer_as_one_at_a_time(server: Server) -> None:
    questions = [f"What is {n} + {3 * n}?" for n in range(11, 19)]
    questions += [f"Count from {n} to {n + 30}." for n in range(1, 5)]
    questions += [f"Repeat: apple {word} 水" for word in ("river", "Zürich", "🎉", "é")]
    alone = [server.text(text_input=question, max_tokens=200, temperature=0.0) for question in questions]

    def ask(number: int) -> str:
        request = {"text_input": questions[number], "max_tokens": 200, "temperature": 0.0}
        if number % 2:
            return server.text(**request)
        return "".join(event["text_output"] for event in server.events(**request))

    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(ask, range(len(questions))))
    assert together == alone


def test_a_deadline_ends_a_stream_with_an_error(null_server: Server) -> None:
    tensors = batched(text_input="Tell me", max_tokens=4000, stream=True, ignore_eos=True)  # for 20 s
    chunks = list(null_server.stream(tensors, timeout=5_000_000))
    assert "timeout" in chunks[-1].error
    assert "".join(chunk.text for chunk in chunks)


def test_a_deadline_may_come_with_the_first_token(null_server: Server) -> None:
    for timeout_us in range(1000, 21000, 1000):
        tensors = batched(text_input="x", max_tokens=4000, stream=True)
        assert "timeout" in list(null_server.stream(tensors, timeout=timeout_us))[-1].error


def test_bytes_that_are_no_text(server: Server) -> None:
    chunks = list(server.stream([Tensor("text_input", "BYTES", [[b"\xff\xfe"]])]))
    assert "text_input" in chunks[-1].error
    assert "UTF-8" in chunks[-1].error
