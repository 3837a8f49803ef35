"""`LLM` and the running server are asked the same and answer the same: texts, reasons, counts, refusals."""

from __future__ import annotations

import json
import shutil
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minisgl_backend import LLM
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.models.folder import find_model_dir
from tests.e2e.conftest import RunningServer
from tests.e2e.wire import Server

pytestmark = pytest.mark.e2e

EXAMPLES, MANY_EXAMPLES = 60, 1000  # with --full
TOLERANCE = 2e-3  # of log-probabilities: both sides add up in orders of their own
# SamplingParams fields that the server knows by another name.
SERVER_NAMES = {"n": "num_return_sequences", "stop": "stop_words", "logprobs": "num_logprobs"}


@dataclass(frozen=True)
class Ask:
    """One request: messages of a chat, a text as it is, or token ids; and fields of SamplingParams."""

    prompt: Any
    is_chat: bool
    params: dict[str, Any]
    stream: bool


@dataclass
class Told:
    """An answer, one entry a sequence; or why there is none."""

    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # (token id, its log-probability)
    num_prompt_tokens: int = 0
    refused: str = ""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=600, max_running_requests=8, dtype="float32") as llm:
        yield llm


QUESTIONS = ["What is 17 + 25?", "Count from 1 to 30.", "Repeat: naïve 你好 🎉 é", "Reverse: abc def", "Hi."]
TEXTS = [*QUESTIONS, "Once upon a", "x", " leading", "1, 2, 3,"]
STOPS = ["1", "4", ", ", " ", "9, 1", "é", "🎉", "42", "e", "xyz", ""]


def texts_of_content(text: str) -> st.SearchStrategy[Any]:
    """A content as a text, and as OpenAI's parts."""
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    return st.sampled_from([text, [{"type": "text", "text": text}], parts])


CHATS = st.sampled_from(QUESTIONS).flatmap(texts_of_content).map(lambda content: [{"role": "user", "content": content}])
TOKEN_IDS = st.lists(st.integers(16, 1023), min_size=1, max_size=40)
PROMPTS = st.tuples(CHATS, st.just(True)) | st.tuples(st.sampled_from(TEXTS) | TOKEN_IDS, st.just(False))
LONG = "a prompt of the context's length"
WRONG_PROMPTS = st.tuples(st.sampled_from([[1024], [-1], "", LONG]), st.just(False))


def number(low: float, high: float) -> st.SearchStrategy[float]:
    """Those that a tensor of float32 holds exactly."""
    return st.floats(low, high, width=32)


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 2, 5, 12, 24, 40]), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "temperature": st.just(0.0) | number(0.125, 2.0),
        "top_k": st.sampled_from([-1, 0, 1, 5, 1000]),
        "top_p": number(0.0625, 1.0) | st.just(0.0),
        "min_p": number(0.0, 0.5),
        "repetition_penalty": number(0.5, 2.0),
        "presence_penalty": number(-2.0, 2.0),
        "frequency_penalty": number(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(16, 1023).map(str), number(-100, 5), max_size=3),
        "bad_words": st.lists(st.sampled_from(["2", "the", "12", "é", ""]), max_size=2),
        "stop": st.lists(st.sampled_from(STOPS), max_size=3),
        "stop_token_ids": st.lists(st.integers(16, 1023), max_size=30),
        "min_tokens": st.integers(0, 12),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "n": st.sampled_from([1, 1, 2, 3]),
        "logprobs": st.sampled_from([0, 1, 5]),
    },
)
WRONG_PARAMS = st.sampled_from(
    [
        {"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": 2.0}, {"max_tokens": 0}, {"min_tokens": 41},
        {"repetition_penalty": 0.0}, {"presence_penalty": 9.0}, {"n": 0}, {"n": 1000}, {"logprobs": 21},
        {"stop_token_ids": [1024]}, {"stop": ["x"] * 65}, {"logit_bias": {"5": 101.0}}, {"logit_bias": {"1024": 1.0}},
    ]
)  # fmt: skip


def asked(prompt: tuple[Any, bool], params: dict[str, Any], wrong: dict[str, Any], stream: bool) -> Ask:
    least = min(params.get("min_tokens", 0), params["max_tokens"])
    return Ask(*prompt, {**params, "min_tokens": least, **wrong}, stream)


RIGHT_ASKS = st.builds(asked, PROMPTS, PARAMS, st.just({}), st.booleans())
# With one fault each: which of several is told is nobody's business.
WRONG_ASKS = st.builds(asked, PROMPTS, PARAMS, WRONG_PARAMS, st.booleans())
ASKS = st.integers(0, 9).flatmap(
    lambda dice: (
        st.builds(asked, WRONG_PROMPTS, PARAMS, st.just({}), st.booleans())
        if dice == 0
        else WRONG_ASKS
        if dice == 1
        else RIGHT_ASKS
    )
)


def test_the_same_requests_have_the_same_answers(server: Server, llm: LLM, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("--full", default=False)

    @settings(
        max_examples=MANY_EXAMPLES if full else EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # an answer depends on nothing else: the first that differs says enough
        suppress_health_check=list(HealthCheck),
    )
    @given(ASKS)
    def compare(ask: Ask) -> None:
        assert_same(ask, ask_llm(llm, ask), ask_server(server, ask))

    compare()


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["1"], "min_tokens": 20},
        {"stop": ["9, 10"]},
        {"stop_token_ids": [64]},
        {"stop_token_ids": [64], "include_stop_str_in_output": True},
        {"stop": ["9, 10"], "include_stop_str_in_output": True},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        {"stop": ["0"], "n": 3, "temperature": 1.0, "seed": 5},
        {"max_tokens": 7, "logprobs": 2},
        {},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_known_differences_are_none_any_more(server: Server, llm: LLM, params: dict[str, Any], stream: bool) -> None:
    prompt = [{"role": "user", "content": "Count from 1 to 12."}]
    ask = Ask(prompt, True, {"max_tokens": 60, **params}, stream)
    found = ask_llm(llm, ask)
    assert not found.refused
    assert_same(ask, found, ask_server(server, ask))


def test_yarn_is_served_to_its_full_length(tmp_path: Path) -> None:
    """Four times the trained context, through every process."""
    model = tmp_path / "model"
    shutil.copytree(find_model_dir("demo"), model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 256
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (model / "config.json").write_text(json.dumps(config))
    with (
        LLM(str(model), num_pages=600, dtype="float32") as llm,
        RunningServer(tmp_path, {"model": str(model)}) as server,
    ):
        text = "Count from 1 to 200. " * 200
        prompt = llm.tokenizer.encode(text)
        for ids, max_tokens in ((prompt[:1016], 100), (prompt[:300], 20)):
            ask = Ask(ids, False, {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}, True)
            found = ask_llm(llm, ask)
            assert found.counts == [min(max_tokens, 1024 - len(ids))]
            assert found.reasons == ["length"]
            assert_same(ask, found, ask_server(server, ask))
        for ids in (prompt[:1024], prompt[:1500]):
            ask = Ask(ids, False, {"max_tokens": 5}, False)
            found = ask_llm(llm, ask)
            assert f"has {len(ids)} tokens" in found.refused
            assert_same(ask, found, ask_server(server, ask))


def ask_llm(llm: LLM, ask: Ask) -> Told:
    prompt = [5] * 4096 if ask.prompt == LONG else ask.prompt
    try:
        [answer] = llm.chat(prompt, **ask.params) if ask.is_chat else llm.generate(prompt, **ask.params)
    except InvalidRequestError as error:
        return Told(refused=str(error))
    told = Told(num_prompt_tokens=answer.num_prompt_tokens)
    for one in answer.completions:
        told.texts.append(one.text)
        told.reasons.append(one.finish_reason)
        told.counts.append(len(one.token_ids))
        values = one.logprobs or []
        told.logprobs.append([(entry.token_id, entry.logprob) for entry in values])
        assert one.logprobs is None or [entry.token_id for entry in values] == one.token_ids
    return told


def ask_server(server: Server, ask: Ask) -> Told:
    body = {SERVER_NAMES.get(name, name): value for name, value in ask.params.items()}
    body |= {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    body["return_logprobs"] = "logprobs" in ask.params
    if "logit_bias" in body:
        body["logit_bias"] = json.dumps(body["logit_bias"])
    for name in ("stop_words", "bad_words", "stop_token_ids"):
        if body.get(name) == []:  # a tensor has at least one element
            del body[name]
    if ask.is_chat:
        body["messages"] = json.dumps(ask.prompt)
    elif ask.prompt == LONG:
        body["prompt_token_ids"] = [5] * 4096
    elif isinstance(ask.prompt, str):
        body |= {"text_input": ask.prompt, "apply_chat_template": False}
    else:
        body["prompt_token_ids"] = ask.prompt
    if not ask.stream:
        status, answer = server.generate(**body)
        return Told(refused=answer["error"]) if status != 200 else told_by([answer], ask)
    try:
        events = server.events(**body)
    except urllib.error.HTTPError as error:
        return Told(refused=json.loads(error.read().decode().removeprefix("data: "))["error"])
    return Told(refused=events[0]["error"]) if "error" in events[0] else told_by(events, ask)


def told_by(events: list[dict[str, Any]], ask: Ask) -> Told:
    """The responses of one request put together."""
    n = ask.params.get("n", 1)
    told = Told([""] * n, [""] * n, [0] * n, [[] for _ in range(n)], events[0]["num_input_tokens"])
    for event in events:
        columns = {name: value if isinstance(value, list) else [value] for name, value in event.items()}
        first = columns.get("sequence_index", [0])[0]
        for place, text in enumerate(columns["text_output"]):
            index = first + place
            told.texts[index] += text
            told.counts[index] += columns["num_output_tokens"][place]
            if columns["finish_reason"][place] != "None":
                assert not told.reasons[index]
                told.reasons[index] = columns["finish_reason"][place]
            for position in json.loads(columns["logprobs"][place]) or [] if "logprobs" in columns else []:
                token, entry = next(iter(position.items()))  # the token of the position comes first
                told.logprobs[index].append((int(token), entry["logprob"]))
    return told


def assert_same(ask: Ask, found: Told, served: Told) -> None:
    assert bool(found.refused) == bool(served.refused), (ask, found, served)
    if found.refused:
        assert refusal(found.refused) == refusal(served.refused), (ask, found.refused, served.refused)
        return
    for name in ("texts", "reasons", "counts", "num_prompt_tokens"):
        assert getattr(found, name) == getattr(served, name), (name, ask, found, served)
    for ours, theirs in zip(found.logprobs, served.logprobs, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs], (ask, found, served)
        for (_, one), (_, other) in zip(ours, theirs, strict=True):
            assert other == pytest.approx(max(one, -1e4), abs=TOLERANCE), (ask, found, served)


def refusal(message: str) -> str:
    """What is wrong, without the name that this side has for the field or the prompt."""
    message = message.removeprefix("in ensemble 'ensemble', ").removeprefix("the prompt ")
    for name in ("prompt_token_ids ", "text_input ", "messages "):
        message = message.removeprefix(name)
    return message.partition(" is ")[2] or message
