"""Requests to engine requests: defaults, aliases, every refusal by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.errors import CapacityError, InvalidRequestError, status_of
from minisgl_backend.ipc.wire import Codec, EngineRequest
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import Grammar
from minisgl_backend.serving.codec import RequestCodec
from minisgl_backend.serving.prompt_settings import CodecSettings
from minisgl_backend.serving.tensors import INPUTS, TENSORS
from minisgl_backend.text.prompt_borders import PromptBorders
from minisgl_backend.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "model_repository" / "engine" / "demo_model"
NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "FP16": np.float16}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def codec(tokenizer: Tokenizer) -> RequestCodec:
    return RequestCodec(tokenizer, CodecSettings.of_model(ModelConfig.load(DEMO)))


def tensors(**values: Any) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if TENSORS[name].dtype == "STRING":
            items = [item.encode() if isinstance(item, str) else item for item in items]
            arrays[name] = np.array([items], dtype=object)
        else:
            arrays[name] = np.array([items], dtype=NUMPY[TENSORS[name].dtype])
    return arrays


def decode(codec: RequestCodec, parameters: dict[str, Any] | None = None, **values: Any) -> EngineRequest:
    return codec.decode(tensors(**{"text_input": "hello", **values}), parameters)[1]


def test_defaults_are_the_models(codec: RequestCodec) -> None:
    spec = decode(codec)
    assert spec.params.greedy
    assert spec.params.max_tokens is None
    assert spec.params.n == 1
    assert not spec.options.stream
    assert spec.options.prompt is None
    assert Codec().spec(Codec().pack(spec)) == spec


def test_what_the_models_files_say(tokenizer: Tokenizer) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    model = ModelConfig.from_dicts(config, generation)
    codec = RequestCodec(tokenizer, CodecSettings.of_model(model))
    params = decode(codec).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert not decode(codec, end_id=1).params.ignore_eos
    ids, _ = codec.decode(tensors(prompt_token_ids=[5] * 16383))  # YaRN makes the context four times as long
    assert len(ids) == 16383
    with pytest.raises(InvalidRequestError, match="16384 tokens; this model takes prompts of at most 16383"):
        codec.decode(tensors(prompt_token_ids=[5] * 16384))
    shorter = RequestCodec(tokenizer, CodecSettings.of_model(model, 8192))
    with pytest.raises(InvalidRequestError, match="at most 8191"):
        shorter.decode(tensors(prompt_token_ids=[5] * 8192))


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"random_seed": 7}, "seed", 7),
        ({"random_seed": 7, "seed": 8}, "seed", 8),
        ({"min_length": 3}, "min_tokens", 3),
        ({"top_p": 0.0}, "top_p", 1.0),
        ({"top_p": -1.0}, "top_p", 1.0),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"stop_words": ["", "a", ""]}, "stop", ("a",)),
        ({"stop_words": ["<|im_end|>", "x"]}, "stop_token_ids", (2,)),
        ({"sampling_parameters": '{"best_of": 2, "n": 2}'}, "n", 2),
        ({"sampling_parameters": '{"seed": -1}'}, "seed", None),
        ({"image": [""], "lora_task_id": 0, "decoder_text_input": "", "embedding_bias_words": [],
          "num_draft_tokens": 0, "lora_config": [], "sampling_parameters": '{"lora_name": ""}'}, "n", 1),
        ({"bad_words": [""]}, "bad_words_token_ids", ()),
        ({"num_return_sequences": 3}, "n", 3),
        ({"num_logprobs": 2}, "logprobs", 2),
        ({"return_cumulative_logprob": True}, "logprobs", 0),
        ({"logit_bias": '{"5": -3, "6": 1.5}'}, "logit_bias", {5: -3.0, 6: 1.5}),
        ({"end_id": 2}, "ignore_eos", False),
        ({"end_id": 5}, "stop_token_ids", (5,)),
        ({"end_id": -1}, "ignore_eos", True),
        ({"speculative": False}, "speculative", False),
        ({"sampling_parameters": '{"max_tokens": "7", "temperature": "0.25"}'}, "max_tokens", 7),
        ({"sampling_parameters": '{"top_k": -1}'}, "top_k", 0),
        ({"sampling_parameters": '{"stop": "x"}'}, "stop", ("x",)),
        ({"sampling_parameters": '{"stop": ["x", "y"], "seed": null}'}, "stop", ("x", "y")),
        ({"sampling_parameters": '{"max_tokens": 7}', "max_tokens": 9}, "max_tokens", 9),
        ({"sampling_parameters": '{"guided_decoding": {"json": {"type": "object"}}}'}, "grammar",
         Grammar(kind="json_schema", text='{"type": "object"}')),
        ({"guided_decoding_guide_type": "json"}, "grammar", Grammar(kind="json")),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}, "grammar",
         Grammar(kind="regex", text="a+")),
        ({"sampling_parameters": '{"guided_decoding": {"choice": ["😀", "a\\"b"]}}'}, "grammar",
         Grammar(kind="ebnf_grammar", text='root ::= "😀" | "a\\"b"')),
    ],
)  # fmt: skip
def test_fields(codec: RequestCodec, values: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(decode(codec, **values).params, field) == expected


def test_request_parameters_are_fields_too(codec: RequestCodec) -> None:
    spec = decode(codec, {"max_tokens": "12", "temperature": "0.5", "ignore_eos": "true", "triton_x": 1, "model": "m"})
    assert (spec.params.max_tokens, spec.params.temperature, spec.params.ignore_eos) == (12, 0.5, True)
    with pytest.raises(InvalidRequestError, match="'tempersture' is unknown"):
        decode(codec, {"tempersture": 1})


def test_return_logprobs_decides_where_vllm_is_spoken(codec: RequestCodec) -> None:
    def options(**values: Any) -> tuple[bool, bool]:
        found = codec.decode(tensors(**values))[1].options
        return found.logprobs, found.null_logprobs

    vllm = {"vllm_text_input": "hello", "sampling_parameters": '{"logprobs": 2}'}
    assert options(**vllm) == (False, False)
    assert options(**vllm, return_logprobs=False) == (False, False)
    assert options(**vllm, return_logprobs=True) == (True, False)
    assert options(vllm_text_input="hello", return_logprobs=True, return_cumulative_logprob=True) == (True, True)
    assert options(text_input="hello", num_logprobs=2) == (True, False)
    assert options(text_input="hello", num_logprobs=2, return_logprobs=False) == (False, False)
    assert not codec.decode(tensors(vllm_text_input="hello"), {"logprobs": 2})[1].options.logprobs


def test_an_adapter_is_named_as_in_vllm_backend(codec: RequestCodec) -> None:
    named: list[tuple[dict[str, Any], dict[str, Any]]]
    named = [({"sampling_parameters": '{"lora_name": "x"}'}, {}), ({}, {"lora_name": "x"}), ({"lora_name": "x"}, {})]
    for values, parameters in named:
        assert decode(codec, parameters, **values).params.lora_name == "x"
    assert decode(codec).params.lora_name is None
    with pytest.raises(InvalidRequestError, match="lora_task_id is not served: name an adapter of the server by"):
        decode(codec, {"lora_task_id": 1})


def test_a_list_that_is_too_long_names_the_one_limit(codec: RequestCodec) -> None:
    for count in (65, 10_000):
        with pytest.raises(InvalidRequestError, match=f"stop_words is {count} entries; allowed: at most 64"):
            decode(codec, stop_words=["x"] * count)


def test_token_ids_are_a_prompt(codec: RequestCodec) -> None:
    """tensorrt_llm's names; the prompt goes before the answer where nobody says anything, but not in a stream."""
    asked = {"trtllm_input_ids": [5, 6, 7, 0], "input_lengths": 3, "request_output_len": 9, "runtime_top_k": 1}
    ids, spec = codec.decode(tensors(**asked, runtime_top_p=0.0, streaming=False, end_id=2, pad_id=0))
    assert ids.tolist() == [5, 6, 7]
    assert (spec.params.max_tokens, spec.params.top_k, spec.params.top_p) == (9, 1, 1.0)
    assert (spec.options.token_ids, spec.options.apart, spec.options.stream) == (True, True, False)
    assert np.frombuffer(spec.options.prompt_ids, dtype="<i4").tolist() == [5, 6, 7]
    assert codec.decode(tensors(**asked, streaming=True))[1].options.prompt_ids == b""
    assert codec.decode(tensors(**asked, exclude_input_in_output=True))[1].options.prompt_ids == b""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_lengths": 4}, "input_lengths is 4; allowed: 1 to 3"),
        ({"input_lengths": 0}, "input_lengths is 0"),
        ({"text_input": "x"}, "text_input and input_ids are both given"),
        ({"trtllm_input_ids": [5] * 5000}, "input_ids has 5000 tokens; this model takes prompts of at most 4095"),
        ({"beam_width": 2}, "beam_width is 2"),
        ({"draft_input_ids": [1]}, "draft_input_ids is not served"),
        ({"stop_words_list": [1, 2, 2, -1]}, "stop_words_list has a word of 2 tokens"),
        ({"bad_words_list": [1, 2, 5, -1]}, "bad_words_list has a word from 0 to 5"),
        ({"stop_request": True}, "stop is true and the request has no id"),
    ],
)
def test_wrong_requests_with_token_ids(codec: RequestCodec, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        codec.decode(tensors(**{"trtllm_input_ids": [5, 6, 7], **values}))


def test_word_lists_of_token_ids(codec: RequestCodec) -> None:
    asked = {"trtllm_input_ids": [5], "stop_words_list": [8, 9, 1, 2], "bad_words_list": [3, 4, 5, 2, 3, -1]}
    params = codec.decode(tensors(**asked))[1].params
    assert (params.stop_token_ids, params.bad_words_token_ids) == ((8, 9), ((3, 4), (5,)))


def test_a_stop_request(codec: RequestCodec) -> None:
    _, spec = codec.decode(tensors(trtllm_input_ids=[0], input_lengths=0, stop_request=True), request_id="mine")
    assert (spec.stop, spec.request_id) == (True, "mine")


@pytest.mark.parametrize("name", ["trtllm_input_ids", "stop_request", "num_responses", "streaming", "vllm_text_input"])
def test_what_names_an_ensemble_is_no_request_parameter(codec: RequestCodec, name: str) -> None:
    for parameters in ({name: "1"}, {"sampling_parameters": json.dumps({name: "1"})}):
        with pytest.raises(InvalidRequestError, match=f"'{name}' is unknown"):
            decode(codec, parameters)


def test_thoughts_are_bounded_by_the_tags_of_the_models_format(codec: RequestCodec, tokenizer: Tokenizer) -> None:
    options = {"thinking_token_budget": 8, "reasoning_parser": "qwen3"}
    for prompt, is_open in (("Hm? <think>\n", True), ("<think> </think>", False)):
        params = decode(
            codec, text_input=prompt, sampling_parameters=json.dumps(options), apply_chat_template=False
        ).params
        assert params.thinking_tags is not None
        assert params.thinking_token_budget == 8
        assert tokenizer.decode(params.thinking_tags.closing) == "</think>"
        assert params.thinking_tags.is_open == is_open
    for parser, message in (
        ("auto", "budget is 8; allowed: none, as it is not known"),
        ("none", "budget is 8"),
        ("x", "'x'"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            decode(codec, sampling_parameters=json.dumps({**options, "reasoning_parser": parser}))
    assert decode(codec, sampling_parameters='{"thinking_token_budget": -1}').params.thinking_token_budget is None
    with pytest.raises(InvalidRequestError, match="thinking_token_budget is -2; allowed: 0 or more, or no limit: -1"):
        decode(codec, sampling_parameters='{"thinking_token_budget": -2}')


def test_a_tenant_is_a_short_name(codec: RequestCodec) -> None:
    assert decode(codec).tenant == ""
    assert decode(codec, sampling_parameters='{"tenant": "ada"}').tenant == "ada"
    for name in ("x" * 65, "Zoë"):
        with pytest.raises(InvalidRequestError, match="allowed: at most 64 printable ASCII characters"):
            decode(codec, sampling_parameters=json.dumps({"tenant": name}))


def test_bad_words_with_and_without_a_space(codec: RequestCodec, tokenizer: Tokenizer) -> None:
    words = decode(codec, bad_words=["blue"]).params.bad_words_token_ids
    expected = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("blue", " blue")}
    assert set(words) == expected


def test_the_prompt_is_repeated_only_when_asked_and_not_streamed(codec: RequestCodec) -> None:
    assert decode(codec, exclude_input_in_output=False).options.prompt == "hello"
    assert decode(codec, exclude_input_in_output=False, stream=True).options.prompt is None
    assert decode(codec, exclude_input_in_output=True).options.prompt is None


def test_a_prompt_of_token_ids(codec: RequestCodec, tokenizer: Tokenizer) -> None:
    given = tokenizer.encode("Count to 9.")
    for many in (given, given * 300):
        ids, _ = codec.decode(tensors(prompt_token_ids=many))
        assert ids.tolist() == many
    _, spec = codec.decode(tensors(prompt_token_ids=given, exclude_input_in_output=False))
    assert spec.options.prompt == "Count to 9."


@pytest.mark.parametrize("wrong", [[], [-1], [1, 10**6], [1] * 5000, ["x"], [1.5], "1", [True]])
def test_token_ids_that_are_none_of_the_model(codec: RequestCodec, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        codec.decode({}, {"prompt_token_ids": wrong})


def test_token_ids_beside_a_text(codec: RequestCodec) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        codec.decode(tensors(prompt_token_ids=[1, 2], text_input="x"))


def test_messages_go_through_the_template(codec: RequestCodec, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids, _ = codec.decode(tensors(messages=json.dumps(messages)))
    assert ids.tolist() == tokenizer.encode(tokenizer.render(messages), add_special_tokens=False)
    listed, _ = codec.decode({}, {"sampling_parameters": json.dumps({"messages": messages})})
    assert listed.tolist() == ids.tolist()
    templated, _ = codec.decode(tensors(text_input="hi", apply_chat_template=True))
    assert templated.tolist() == ids.tolist()
    raw, _ = codec.decode(tensors(text_input="hi"))
    assert len(raw) < len(ids)


@pytest.mark.parametrize("name", [tensor.name for tensor in INPUTS if tensor.refused and tensor.dtype not in ("BOOL",)])
def test_what_is_not_served_is_refused_by_name(codec: RequestCodec, name: str) -> None:
    value = ["x"] if TENSORS[name].dtype == "STRING" else [1]
    with pytest.raises(InvalidRequestError, match=name):
        decode(codec, **{name: value})


def test_flags_that_ask_for_nothing_are_fine(codec: RequestCodec) -> None:
    decode(codec, return_context_logits=False, return_generation_logits=False, use_draft_logits=False, beam_width=1)


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(TENSORS)), _JUNK)
def test_any_parameter_is_served_or_refused_by_name(codec: RequestCodec, name: str, value: Any) -> None:
    parameters = {name: value} if name in ("text_input", "messages") else {"text_input": "x", name: value}
    try:
        ids, spec = codec.decode({}, parameters)
    except InvalidRequestError:
        return
    assert len(ids)
    assert Codec().spec(Codec().pack(spec)) == spec


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_as_a_text(codec: RequestCodec, data: bytes) -> None:
    for name in ("text_input", "messages", "sampling_parameters", "logit_bias", "chat_template_kwargs"):
        values = {"text_input": b"x", name: data}
        if name == "messages":
            del values["text_input"]
        with contextlib.suppress(InvalidRequestError):
            codec.decode({key: np.array([[value]], dtype=object) for key, value in values.items()})


def test_statuses() -> None:
    assert status_of(InvalidRequestError("")) == "INVALID_ARG"
    assert status_of(CapacityError("")) == "UNAVAILABLE"
    assert status_of(KeyError("")) == "INTERNAL"


@pytest.mark.parametrize("by_messages", [True, False])
def test_a_model_with_states_is_told_where_chats_meet(tokenizer: Tokenizer, by_messages: bool) -> None:
    codec = RequestCodec(tokenizer, CodecSettings.of_model(ModelConfig.load(DEMO)), borders=PromptBorders(tokenizer))
    chat = {"messages": json.dumps([{"role": "user", "content": "hello"}])}
    ids, spec = codec.decode(tensors(**(chat if by_messages else {"text_input": "hello", "apply_chat_template": True})))
    assert 0 < spec.stable_len < len(ids)
    assert len(spec.borders) == 1
    plain = codec.decode(tensors(text_input="hello"))[1]
    assert (plain.stable_len, plain.borders) == (0, ())
    tokens = codec.decode(tensors(prompt_token_ids=[5, 6, 7]))[1]
    assert (tokens.stable_len, tokens.borders) == (0, ())
