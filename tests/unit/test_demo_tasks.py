"""The demo model's tasks, tokenizer and files."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.demo_tasks import KINDS, is_held_out, questions, training_conversation
from benchmarks.demo_tools import calls_in

DEMO_MODEL = Path(__file__).resolve().parents[2] / "model_repository/engine/demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def prompt_tokens(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> int:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return len(tokenizer.encode(text + "<|im_start|>assistant\n").ids)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_the_same_for_the_same_seed(kind: str) -> None:
    assert questions(kind, 20, seed=5) == questions(kind, 20, seed=5)
    assert questions(kind, 20, seed=5) != questions(kind, 20, seed=6)


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_are_right_and_those_of_other_questions_are_not(kind: str) -> None:
    asked = questions(kind, 100, seed=1)
    for question, other in itertools.pairwise(asked):
        assert question.kind == kind
        assert question.messages[-1]["role"] in ("user", "tool")
        assert question.is_right(question.answer)
        assert not question.is_right("")
        if question.check == other.check and question.expected != other.expected:
            assert not question.is_right(other.answer)


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"poetry.*arithmetic"):
        questions("poetry", 1, seed=0)


def test_a_count_that_skips_repeats_or_stops_early_is_wrong() -> None:
    question = next(q for q in questions("counting", 50, seed=1) if q.answer.count(",") > 3)
    numbers = question.answer.split(", ")
    assert question.is_right(" ".join(numbers))
    for wrong in (numbers[:-1], numbers[:2] + numbers[3:], [numbers[0], *numbers], [*numbers, "1000"]):
        assert not question.is_right(", ".join(wrong))


def test_a_difference_needs_its_sign() -> None:
    question = next(q for q in questions("arithmetic", 50, seed=1) if "= -" in q.answer)
    assert not question.is_right(question.answer.replace("= -", "= "))


def test_the_last_turns_content_decides_what_is_held_out() -> None:
    for question in questions("arithmetic", 100, seed=2):
        a, sign, b = re.match(r"(\d+) ([+-]) (\d+) =", question.answer).groups()
        assert is_held_out(f"arithmetic {a}{sign}{b}")
    for question in questions("repeat", 100, seed=2):
        assert is_held_out(f"repeat {question.answer}")


def test_training_never_holds_a_held_out_question() -> None:
    rng = Random(3)
    sums = counts = lists = 0
    for _ in range(1500):
        for user, reply in itertools.pairwise(training_conversation(rng)):
            if reply["role"] != "assistant" or user["role"] == "tool":
                continue
            text = reply["content"]
            if found := re.match(r"(\d+) ([+-]) (\d+) =", text):
                assert not is_held_out("arithmetic {}{}{}".format(*found.groups()))
                sums += 1
            elif re.fullmatch(r"\d+(, \d+)+", text) and "ount" in user["content"]:
                numbers = text.split(", ")
                assert not is_held_out(f"counting {numbers[0]}..{numbers[-1]}")
                counts += 1
            elif re.match(r"(Please )?(repeat|say these words again)", user["content"], re.IGNORECASE):
                assert not is_held_out(f"repeat {text}")
                lists += 1
    assert min(sums, counts, lists) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_questions_and_answers_fit_the_context(kind: str, tokenizer: Tokenizer) -> None:
    context = json.loads((DEMO_MODEL / "config.json").read_text())["max_position_embeddings"]
    for question in questions(kind, 150, seed=4):
        answer = len(tokenizer.encode(question.answer).ids)
        assert answer <= 1300
        assert prompt_tokens(tokenizer, question.messages) + answer < context


def test_tools_are_called_and_their_results_told() -> None:
    asked = questions("tool", 60, seed=1)
    calls = [question for question in asked if question.check == "call"]
    assert 15 < len(calls) < 45
    for question in calls:
        (call,) = calls_in(question.answer)
        assert call["name"] in question.messages[0]["content"]
        assert question.is_right(f"I call it. {question.answer}")
        assert not question.is_right(question.answer.replace('"name"', '"nome"'))
        assert not question.is_right(question.answer + question.answer)


def test_the_chat_template_shows_tools_as_training_did(tokenizer: Tokenizer) -> None:
    chat = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for question in questions("tool", 40, seed=2):
        system, *rest = question.messages
        *said, shown = system["content"].split("\n\n")
        functions = re.findall(r"(\w+)\(([^)]*)\)", shown)
        tools = [
            {
                "function": {
                    "name": name,
                    "parameters": {"properties": {key: {} for key in names.split(", ") if key}},
                }
            }
            for name, names in functions
        ]
        messages = [{"role": "system", "content": text} for text in said] + [as_clients_send(m) for m in rest]
        whole = chat.apply_chat_template(messages, tools=tools, tokenize=False)
        assert whole == chat.apply_chat_template(question.messages, tokenize=False)


def as_clients_send(message: dict[str, str]) -> dict[str, Any]:
    calls = [{"type": "function", "function": call} for call in calls_in(message["content"])]
    return {"role": "assistant", "content": None, "tool_calls": calls} if calls else message


def test_recall_reaches_far_back(tokenizer: Tokenizer) -> None:
    lengths = [prompt_tokens(tokenizer, question.messages) for question in questions("recall", 150, seed=4)]
    assert max(lengths) > 2800
    assert min(lengths) < 200


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_every_text_round_trips(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_and_some_characters_take_several(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("What is 17+25?").tokens[-6:] == ["1", "7", "+", "2", "5", "?"]
    assert len(tokenizer.encode("🦄").ids) > 1


def test_the_template_is_chatml() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_files_suit_every_backend() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["num_attention_heads"] >= 8
    assert config["num_key_value_heads"] >= 4
    assert config["head_dim"] in (64, 128)
    assert config["vocab_size"] % 32 == config["intermediate_size"] % 32 == 0
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 12_000_000
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118
