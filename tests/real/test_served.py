"""SmolLM2, from its GGUF file, behind the real server: what clients of OpenAI's API and evaluations ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from minisgl_backend.text.tokenizer import Tokenizer
from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import Endpoint, running_endpoint
from tests.real.models import smollm2, smollm2_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2"


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    parameters = {"model": str(smollm2_gguf()), "dtype": "float32", "max_seq_len_override": "512", "num_pages": "256"}
    with (
        RunningServer(tmp_path_factory.mktemp("smollm2"), parameters) as server,
        running_endpoint(server, served_model_names=(MODEL,)) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return endpoint.client()


def test_a_chat_knows_its_facts_and_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=60)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write 'good morning' in French and in Chinese."}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 5
    # Whole characters, but for one that the limit cuts.
    assert not any("�" in piece for piece in pieces[:-2])


@pytest.mark.parametrize("stop", ["capital", "l of Fr", "aris"])  # a word, over borders of tokens, inside of one
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stop: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert stop in whole
    cut = client.chat.completions.create(**asked, stop=[stop])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (whole.split(stop)[0], "stop")
    chunks = client.chat.completions.create(**asked, stop=[stop], stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.split(stop)[0]


def test_log_likelihoods_of_an_evaluation(client: openai.OpenAI, folder: Path) -> None:
    """The request that lm-evaluation-harness's `local-completions` sends, and what it reads of the answer."""
    tokenizer = Tokenizer(folder)
    context = tokenizer.encode("The capital of France is", add_special_tokens=False)
    prompts = [
        [*context, *tokenizer.encode(city, add_special_tokens=False)] for city in (" Paris.", " London.", " xylophone")
    ]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = []
    for prompt, choice in zip(prompts, sorted(answer.choices, key=lambda one: one.index), strict=True):
        assert choice.logprobs is not None
        found = choice.logprobs.token_logprobs[len(context) : -1]
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        ids = torch.tensor(prompt[len(context) :])
        torch.testing.assert_close(torch.tensor(found), expected.gather(1, ids[:, None])[:, 0], atol=1e-3, rtol=0)
        best = [max(one.values()) for one in choice.logprobs.top_logprobs[len(context) : -1]]
        torch.testing.assert_close(torch.tensor(best), expected.max(-1).values, atol=1e-3, rtol=0)
        sums.append(sum(found))
    assert sums[0] > sums[1] > sums[2]


def test_json_is_kept_by_a_real_vocabulary(client: openai.OpenAI) -> None:
    """A schema's grammar over tokens that hold quotation marks and brackets together."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found["city"] in ("Paris", "London")
    assert isinstance(found["capital"], bool)
