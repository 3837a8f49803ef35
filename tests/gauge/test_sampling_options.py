"""Every way to steer an answer, through the in-process engine on the demo model; numbers against transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from minisgl_backend import LLM, SamplingParams
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, Grammar
from minisgl_backend.step import Logprobs
from tests.gauge.harness import GREEDY, Gauge, drive, engine, expect_short_answers, request_of

PAGE_SIZE = 16
TOP = 5
TOLERANCE = 1e-4
EOS = 2

CONVERSATION = [
    {"role": "user", "content": "Remember: my city is Lisbon and my pet is a fox."},
    {"role": "assistant", "content": "OK, I will remember that."},
    {"role": "user", "content": "Reverse: river, 猫, déjà, 🐱, stone"},
    {"role": "assistant", "content": "stone, 🐱, déjà, 猫, river"},
    {"role": "user", "content": "What is 310 - 77?"},
]
COUNT = [{"role": "user", "content": "Count from 1 to 30."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine(num_pages=512, max_running_requests=8) as llm:
        yield llm


def prompt_of(llm: LLM, conversation: list[dict[str, str]]) -> list[int]:
    return llm.tokenizer.encode(llm.tokenizer.render(conversation), add_special_tokens=False)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **values})


# ---- log-probabilities


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(find_model_dir("demo")), dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocab_size]: line i is the distribution of token i + 1."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), dim=-1)


def assert_equal(found: Logprobs, token: int, expected: torch.Tensor) -> None:
    """One position against its line of the reference."""
    assert found.token_id == token
    assert found.logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
    above = [int((expected > expected[token] + margin).sum()) for margin in (TOLERANCE, -TOLERANCE)]
    assert above[0] + 1 <= found.rank <= max(above[1], 1)
    values = torch.topk(expected, TOP).values.tolist()
    assert list(found.top) == pytest.approx(values, abs=TOLERANCE)
    assert [float(expected[index]) for index in found.top_ids] == pytest.approx(values, abs=TOLERANCE)
    assert len(set(found.top_ids)) == TOP


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_transformers(llm: LLM, reference: Any, temperature: float) -> None:
    prompt = prompt_of(llm, CONVERSATION)
    (output,) = llm.generate([prompt], params(logprobs=TOP, temperature=temperature, seed=3))
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    expected = reference_logprobs(reference, prompt + output.token_ids)[len(prompt) - 1 :]
    for found, token, line in zip(output.logprobs, output.token_ids, expected, strict=True):
        assert_equal(found, token, line)


def check_prompt_logprobs(found: Any, prompt: list[int], expected: torch.Tensor) -> None:
    for values, token, line in zip(found, prompt[1:], expected, strict=True):
        assert_equal(values, token, line)


def test_prompt_logprobs_are_complete_where_the_prompt_is_cached(llm: LLM, reference: Any) -> None:
    prompt = prompt_of(llm, CONVERSATION)
    llm.generate([prompt], params())
    (again,) = llm.generate([prompt], params())
    assert again.num_cached_tokens >= len(prompt) - PAGE_SIZE
    (output,) = llm.generate([prompt], params(prompt_logprobs=TOP))
    assert output.token_ids == again.token_ids
    assert output.num_cached_tokens == 0, "every position is computed"
    check_prompt_logprobs(output.prompt_logprobs, prompt, reference_logprobs(reference, prompt))


@pytest.mark.parametrize(
    ("overlap", "n"),
    [(True, 1), pytest.param(False, 2, marks=pytest.mark.full)],
    ids=["overlapped", "sequential-siblings"],
)
def test_prompt_logprobs_come_once_however_often_it_is_preempted(
    llm: LLM, reference: Any, overlap: bool, n: int
) -> None:
    prompts = [[*prompt_of(llm, CONVERSATION[2 * index :]), 7 + index] for index in (2, 1, 0)] * 3
    options = {"max_prefill_length": 16, "mixed_prefill_length": 16, "page_size": 1}
    sampling = params(prompt_logprobs=TOP, n=n, max_tokens=60, ignore_eos=True, stop_token_ids=(3,))
    with engine(overlap=overlap, num_pages=max(map(len, prompts)) + 62, **options) as starved:
        expect_short_answers(starved)
        outputs = starved.generate(prompts, sampling)
        assert starved.stats.total_preempted > 0
    expected = {len(prompt): reference_logprobs(reference, prompt) for prompt in prompts[:3]}
    for prompt, output in zip(prompts, outputs, strict=True):
        check_prompt_logprobs(output.prompt_logprobs, prompt, expected[len(prompt)])
        assert len(output.completions) == n


# ---- constrained outputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "count", "ok"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text=r"[A-Z][a-z]{2,6}-[0-9]{3}"),
    "ebnf_grammar": Grammar(kind="ebnf_grammar", text='root ::= "yes" | "no" | "maybe " [0-9] [0-9]'),
}


def parses(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(GRAMMARS[kind].text, text) is not None
    if kind == "ebnf_grammar":
        return re.fullmatch(r"yes|no|maybe \d\d", text) is not None
    value = json.loads(text)
    return sorted(value) == ["count", "name", "ok"] and 0 <= value["count"] <= 99 and len(value["name"]) <= 8


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.full)], ids=["overlapped", "sequential"]
)
def test_constrained_outputs_parse_beside_free_ones(overlap: bool) -> None:
    pytest.importorskip("xgrammar")
    with engine(overlap=overlap, num_pages=256, max_running_requests=12) as llm:
        free = llm.chat(COUNT, params(max_tokens=200))[0].token_ids
        kinds = [kind for kind in GRAMMARS for _ in range(3)]
        sampling = [
            params(grammar=GRAMMARS[kind], temperature=1.2, seed=index, max_tokens=200)
            for index, kind in enumerate(kinds)
        ]
        outputs = llm.chat([COUNT] * (len(kinds) + 1), [*sampling, params(max_tokens=200)])
    for kind, output in zip(kinds, outputs, strict=False):
        assert output.finish_reason == "stop"
        assert parses(kind, output.text), output.text
    assert outputs[-1].token_ids == free, "a free sequence does not notice the others' grammars"


# ---- token rules


def test_bad_words_never_appear(llm: LLM) -> None:
    free = llm.chat(COUNT, params(max_tokens=200))[0].text
    assert "7" in free
    outputs = llm.chat([COUNT] * 3, params(bad_words=("7", "12"), max_tokens=80, temperature=0.8))
    for output in outputs:
        assert "7" not in output.text
        assert "12" not in output.text


def test_logit_bias_forbids_and_forces(llm: LLM) -> None:
    free = llm.chat(COUNT, params())[0].token_ids
    (without,) = llm.chat(COUNT, params(logit_bias={free[3]: -100.0}))
    assert free[3] not in without.token_ids
    (forced,) = llm.chat(COUNT, params(logit_bias={77: 100.0}))
    assert forced.token_ids == [77] * 40


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    free = llm.chat(CONVERSATION, params())[0]
    assert free.finish_reason == "stop"
    (longer,) = llm.chat(CONVERSATION, params(min_tokens=len(free.token_ids) + 5))
    assert len(longer.token_ids) >= len(free.token_ids) + 5
    assert EOS not in longer.token_ids[: len(free.token_ids) + 4]


def test_stop_token_ids_and_ignore_eos(llm: LLM) -> None:
    free = llm.chat(COUNT, params(max_tokens=200))[0]
    stop = free.token_ids[10]
    first = free.token_ids.index(stop)
    (stopped,) = llm.chat(COUNT, params(max_tokens=200, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    (endless,) = llm.chat(COUNT, params(max_tokens=len(free.token_ids) + 10, ignore_eos=True))
    assert len(endless.token_ids) == len(free.token_ids) + 10
    assert endless.finish_reason == "length"


# ---- the demo gauge with options that leave its answers as they are

COOL = params(temperature=0.1, max_tokens=GREEDY.max_tokens)
HARMLESS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.95},
    "min-p": {"min_p": 0.05},
    "logprobs": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.001, "presence_penalty": 0.001, "frequency_penalty": 0.001},
    "min tokens": {"min_tokens": 1},
    "stop tokens": {"stop_token_ids": (3,)},
}


def test_options_leave_certain_answers_as_they_are(gauge: Gauge) -> None:
    """Every question with one of the options in turn, and with all of them, all at once."""
    baseline = gauge.baseline(gauge.questions)
    said = {token for output in baseline for token in output.token_ids}
    unused = min(set(range(100, 1000)) - said)
    harmless = {**HARMLESS, "bias": {"logit_bias": {unused: 1.0}}, "bad words": {"bad_words_token_ids": ((unused,),)}}
    together: dict[str, Any] = {}
    for options in harmless.values():
        together |= options
    turns = list(harmless.items())
    asked = [(index, *turns[index % len(turns)]) for index in range(len(baseline))]
    asked += [(index, "all", together) for index in range(len(baseline))]
    sampling = [msgspec.structs.replace(COOL, seed=k, **options) for k, (_, _, options) in enumerate(asked)]
    with engine() as llm:
        outputs = llm.chat([gauge.questions[index].messages for index, _, _ in asked], sampling)
    different = [
        f"{name}: {baseline[index].text!r} -> {output.text!r}"
        for (index, name, _), output in zip(asked, outputs, strict=True)
        if output.text != baseline[index].text
    ]
    assert not different, "\n".join(different)


# ---- n > 1


def test_siblings_share_the_pages_of_their_prompt() -> None:
    n, most = 6, 8
    with engine(num_pages=256, max_running_requests=8) as llm:
        prompt = prompt_of(llm, CONVERSATION)
        full_pages, core = len(prompt) // PAGE_SIZE, llm.engine.core
        leased: list[int] = []
        sampling = params(n=n, max_tokens=most, ignore_eos=True, temperature=1.0, seed=1)
        heard = drive(core, [request_of(0, prompt, sampling)], lambda step: leased.append(core.stats().pages_leased))
        stats = llm.stats
    own_pages = -(-(len(prompt) + most) // PAGE_SIZE) - full_pages
    assert full_pages >= 4
    assert max(leased) <= full_pages + n * own_pages
    assert stats.total_cached_tokens == 0, "what siblings share is no hit of the cache"
    assert all(len(one.token_ids) == most and one.reason is FinishReason.LENGTH for one in heard.values())


def test_cached_tokens_are_reported_for_each_request(llm: LLM) -> None:
    prompt = prompt_of(llm, [{"role": "user", "content": "Repeat: a prompt that nobody has sent, 九, before this one"}])
    first, again = (llm.generate([prompt], params())[0] for _ in range(2))
    assert first.num_cached_tokens < PAGE_SIZE
    assert again.num_cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    assert again.token_ids == first.token_ids
