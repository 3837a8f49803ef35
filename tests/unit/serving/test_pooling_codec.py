"""Texts that are too long, where a request wants them cut: what stands around them stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.models.pooling import ScoreDefaults
from minisgl_backend.serving.pooling_codec import PoolingCodec
from minisgl_backend.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "model_repository" / "engine" / "demo_model"
LIMIT = 400
LONG = "count from 1 to 9 " * 200
BEGIN, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo model's, with a token before and one behind every text, and between two."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in DEMO.glob("*.json"):
        shutil.copy(file, folder)
    file = folder / "tokenizer.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in value["added_tokens"]}
    around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (BEGIN, END)]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [around[0], first, around[1]],
        "pair": [around[0], first, around[1], second, around[1]],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (BEGIN, END)},
    }
    file.write_text(json.dumps(value), encoding="utf-8")
    return Tokenizer(folder)


def prompts(tokenizer: Tokenizer, *, num_labels: int = 0, is_embedding_model: bool = False, **asked: Any) -> list[str]:
    """The prompts of a request, as texts."""
    embedding = SimpleNamespace(not_served="", kind="last", normalize=True, is_embedding_model=is_embedding_model)
    sizes = {"hidden_size": 8, "vocab_size": 10**6, "generates": True}
    model: Any = SimpleNamespace(num_labels=num_labels, embedding=embedding, scores=ScoreDefaults(), **sizes)
    codec = PoolingCodec(tokenizer, model, LIMIT + 1, enabled=True)
    ids, request = codec.decode(json.dumps(asked), deadline=None, request_id="")
    found, start = [], 0
    for length in memoryview(request.lengths).cast("i"):
        found.append(tokenizer.decode(ids[start : start + length].tolist()))
        start += length
    assert max(memoryview(request.lengths).cast("i")) <= LIMIT
    return found


@pytest.mark.parametrize("most", [-1, 350])
def test_a_query_is_never_cut(tokenizer: Tokenizer, most: int) -> None:
    for num_labels in (0, 1):
        with pytest.raises(InvalidRequestError, match="queries that leave room for a document"):
            prompts(tokenizer, num_labels=num_labels, queries=[LONG], documents=["x"], most_tokens=most)


def test_a_text_of_any_length_is_cut(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.serving.pooling_codec._LEAST_TEXT_BYTES", 1000)
    endless = LONG * 10
    for asked in ({"texts": [endless]}, {"queries": ["x"], "documents": [endless], "num_labels": 1}):
        assert prompts(tokenizer, **asked, most_tokens=-1)[0].endswith(END)
        with pytest.raises(InvalidRequestError, match="too long"):
            prompts(tokenizer, **asked)


@pytest.mark.parametrize("most", [-1, 20, 3])
def test_a_text_keeps_the_tokens_around_it(tokenizer: Tokenizer, most: int) -> None:
    cut, short = prompts(tokenizer, texts=[LONG, "hi"], most_tokens=most)
    assert (cut[: len(BEGIN)], cut[-len(END) :]) == (BEGIN, END)
    assert len(tokenizer.encode(cut, add_special_tokens=False)) == (LIMIT if most == -1 else most)
    assert LONG.startswith(cut[len(BEGIN) : -len(END)])
    assert short == f"{BEGIN}hi{END}"


def test_a_document_is_cut_and_not_what_stands_behind_it(tokenizer: Tokenizer) -> None:
    (pair,) = prompts(tokenizer, num_labels=1, queries=["hello"], documents=[LONG], most_tokens=-1)
    assert pair.startswith(f"{BEGIN}hello{END}count from 1 to 9 ")
    assert pair.endswith(END)
    query, document = prompts(tokenizer, is_embedding_model=True, queries=["hello"], documents=[LONG], most_tokens=-1)
    assert (query, document[-len(END) :]) == (f"{BEGIN}hello{END}", END)


def test_a_judged_document_leaves_the_question_whole(tokenizer: Tokenizer) -> None:
    (whole,) = prompts(tokenizer, queries=["hello"], documents=["x"], most_tokens=-1, instruction="Judge")
    before, after = whole.split("<Document>: x")
    (cut,) = prompts(tokenizer, queries=["hello"], documents=[LONG], most_tokens=-1, instruction="Judge")
    assert (cut[: len(before)], cut[-len(after) :]) == (before, after)
    assert "<Document>: count from 1" in cut
