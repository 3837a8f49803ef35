"""Tokens of GGUF files are llama.cpp's, which were recorded in gguf_tokens.json."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.models.gguf_splits import PRE_TOKENIZERS
from minisgl_backend.models.gguf_tokenizer import GGUFTokenizer
from minisgl_backend.weights.gguf_header import GGUFHeader
from tests.tiny_gguf import VOCAB, write

RECORDED = json.loads(Path(__file__).with_name("gguf_tokens.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SENTENCEPIECE: Mapping[str, Mapping[str, bool]] = {
    "spm": {},
    "spm-no-prefix": {"add_space_prefix": False},
    "spm-eos": {"add_bos_token": False, "add_eos_token": True},
}


def header(name: str = "model.gguf", **metadata: Any) -> GGUFHeader:
    """`metadata`: behind tokenizer.ggml., or whole keys."""
    keys = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return GGUFHeader(files=(Path(name),), metadata=keys, tensors={})


def recorded(name: str) -> GGUFHeader:
    is_bytes = name not in SENTENCEPIECE and PRE_TOKENIZERS[name].byte_level
    vocabulary = RECORDED["vocabularies"]["bytes" if is_bytes else "utf-8"]
    tokens = [*vocabulary["tokens"], "<s>", "</s>"]
    types = [BYTE if text.startswith("<0x") and not is_bytes else NORMAL for text in tokens[:-2]] + [CONTROL] * 2
    ids = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    if name not in SENTENCEPIECE:
        merges = vocabulary["merges"]
        return header(model="gpt2", pre=name, tokens=tokens, token_type=types, merges=merges, **ids)
    scores = [-float(number) for number in range(len(tokens) + 1)]
    return header(
        model="llama", tokens=[*tokens, "<unk>"], token_type=[*types, UNKNOWN], scores=scores,
        unknown_token_id=len(tokens), **ids, **SENTENCEPIECE[name],
    )  # fmt: skip


def backend(file: GGUFHeader) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(GGUFTokenizer(file).files()["tokenizer.json"]))


@pytest.mark.parametrize("result", RECORDED["results"], ids=lambda result: result["names"][0])
def test_tokens_are_those_of_llama_cpp(result: Mapping[str, Any]) -> None:
    for name in result["names"]:
        tokenizer = backend(recorded(name))
        found = [tokenizer.encode(text).ids for text in RECORDED["texts"]]
        assert dict(zip(RECORDED["texts"], map(len, found), strict=True)) == dict(
            zip(RECORDED["texts"], result["counts"], strict=True)
        ), name
        assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == result["sha256"], name
        texts = [tokenizer.decode(ids) for ids in found if ids]
        assert texts == [text for text, ids in zip(RECORDED["texts"], found, strict=True) if ids], name


def test_every_name_was_recorded() -> None:
    names = [name for result in RECORDED["results"] for name in result["names"]]
    assert sorted(names) == sorted([*PRE_TOKENIZERS, *SENTENCEPIECE])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        # llama.cpp's expressions take marks, and letters outside ASCII, for other than the models' own ones do.
        ("gpt-4o", "cafe\u0301s नमस्ते", ["cafe\u0301s", " नमस्ते"]),
        ("tekken", "thenUPPER ÉtéÉté", ["then", "UPPER", " Été", "Été"]),
        ("youtu", "fooBar", ["foo", "Bar"]),
        ("tiny_aya", "HTTPServer 1234567", ["HTTPServer", " ", "1", "234", "567"]),
        ("kimi-k2", "中文abc漢字", ["中文", "abc", "漢字"]),
        ("deepseek-llm", "Hello\u3000world 2024年", ["Hello", "\u3000", "world", " ", "2024", "年"]),
    ],
)
def test_words_are_those_of_the_models_tokenizers(name: str, text: str, words: list[str]) -> None:
    found = backend(recorded(name)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


@pytest.mark.parametrize("pre", ["qwen4", "whitespace", "LLAMA-BPE"])
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre: str) -> None:
    with pytest.raises(ConfigError, match=f"^m.gguf: tokenizer.ggml.pre is '{pre}'; allowed: .*docs/models.md lists$"):
        GGUFTokenizer(header("m.gguf", model="gpt2", pre=pre, tokens=["a"]))


def test_the_docs_list_every_name() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    assert [name for name in PRE_TOKENIZERS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "none", None])
def test_other_kinds_of_tokenizers_are_refused_by_name(model: str | None) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.model is {model!r}; allowed: gpt2, llama, gemma4"):
        GGUFTokenizer(header(model=model, tokens=["a"]))


def test_an_absent_pre_tokenizer_is_told(caplog: pytest.LogCaptureFixture) -> None:
    file = recorded("default")
    named = backend(file).encode("It's 12345, no?").ids
    file = GGUFHeader(
        files=file.files, metadata={k: v for k, v in file.metadata.items() if not k.endswith(".pre")}, tensors={}
    )
    with caplog.at_level(logging.WARNING):
        assert backend(file).encode("It's 12345, no?").ids == named
    assert "has no tokenizer.ggml.pre" in caplog.text


def bytes_file(*more: str, types: tuple[int, ...] = (), **metadata: Any) -> GGUFHeader:
    tokens = [*RECORDED["vocabularies"]["bytes"]["tokens"], *more]
    kinds = [NORMAL] * (len(tokens) - len(more)) + list(types or [CONTROL] * len(more))
    return header(model="gpt2", tokens=tokens, token_type=kinds, merges=[], **{"pre": "qwen2", **metadata})


NUMBER = len(RECORDED["vocabularies"]["bytes"]["tokens"])  # of the first token behind them


def test_tokens_before_between_and_behind() -> None:
    file = bytes_file(
        "<s>", "</s>", "<sep>", bos_token_id=NUMBER, eos_token_id=NUMBER + 1, seperator_token_id=NUMBER + 2
    )
    assert backend(file).encode("a").ids == backend(file).encode("a", add_special_tokens=False).ids
    all_of = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    file = GGUFHeader(
        files=file.files,
        metadata={**file.metadata, **{f"tokenizer.ggml.{k}": v for k, v in all_of.items()}},
        tensors={},
    )
    assert backend(file).encode("a").tokens == ["<s>", "a", "</s>"]
    assert backend(file).encode("a", "b").tokens == ["<s>", "a", "</s>", "<sep>", "b", "</s>"]


def test_llama3_begins_with_a_token_unless_told_otherwise() -> None:
    assert backend(bytes_file("<s>", bos_token_id=NUMBER, pre="llama-bpe")).encode("a").tokens == ["<s>", "a"]
    file = bytes_file("<s>", bos_token_id=NUMBER, pre="llama-bpe", add_bos_token=False)
    assert backend(file).encode("a").tokens == ["a"]
    with pytest.raises(
        ConfigError, match=r"tokenizer.ggml.bos_token_id does not name; allowed: it, or .*add_bos_token"
    ):
        backend(bytes_file("<s>", pre="llama-bpe"))


def test_a_special_token_out_of_the_vocabulary_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert GGUFTokenizer(bytes_file("<s>", bos_token_id=9999)).special_id("bos") is None
    assert "tokenizer.ggml.bos_token_id is 9999, which is no token" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries; allowed: one for each token"),
        ({"tokens": None}, "tokenizer.ggml.tokens has no list; allowed: one for each token"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens has a text twice"),
        ({"merges": None}, "tokenizer.ggml.merges has no list"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'; allowed: true, false"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    file = bytes_file("<s>", bos_token_id=NUMBER)
    metadata = {**file.metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(ConfigError, match=said):
        backend(GGUFHeader(files=file.files, metadata=metadata, tensors={}))


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    file = bytes_file("<|im_start|>", "<think>", "<|im_end|>", types=(CONTROL, USER_DEFINED, NORMAL))
    tokenizer = backend(file)
    ids = tokenizer.encode("<|im_start|><think>a<|im_end|>").ids
    assert [*ids[:2], ids[-1]] == [NUMBER, NUMBER + 1, NUMBER + 2]
    assert tokenizer.decode(ids) == "<think>a"  # <|im_end|> ends turns, whatever its type says
    assert GGUFTokenizer(file).ends == [NUMBER + 2]


def test_an_ordinary_token_that_looks_like_an_end_is_text() -> None:
    """Qwen's </s>, of HTML, which no text gives: it is cut before merges apply."""
    file = bytes_file("</s>", "</s", types=(NORMAL, NORMAL))
    assert GGUFTokenizer(file).ends == []
    assert NUMBER not in backend(file).encode("<s>old</s>").ids


def test_what_ends_an_output() -> None:
    names = ("<|eot_id|>", "<|file_sep|>", "<eos>", "<other>", "<|end|>", "<|return|>", "<|call|>")
    file = bytes_file(*names, eos_token_id=NUMBER + 3, eom_token_id=NUMBER + 2)
    # As in llama.cpp, <|end|> does not where <|return|> and <|call|> are: it ends a message within an output.
    assert sorted(GGUFTokenizer(file).ends) == [NUMBER + number for number in (0, 1, 2, 3, 5, 6)]


def test_blanks_behind_special_tokens_of_phi3_are_theirs() -> None:
    file = recorded("spm")
    named = GGUFHeader(files=file.files, metadata={**file.metadata, "general.name": "Phi-3 mini"}, tensors={})
    assert backend(named).encode("a</s>  a").tokens[-1] == backend(named).encode("a").tokens[-1]
    assert len(backend(named).encode("a</s>  a").ids) < len(backend(file).encode("a</s>  a").ids)


def test_a_folder_loads_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def templates(writer: Any) -> None:
        writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])

    folder = find_model_dir(str(write(tmp_path / "model.gguf", "qwen3", change=templates)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer.encode("<|im_end|>") == [VOCAB - 1]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("t2", "t3", "t0")
    assert tokenizer.chat_template == {"default": "a", "tool_use": "b"}
