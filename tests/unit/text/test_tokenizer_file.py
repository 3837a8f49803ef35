"""The tokens of a folder are those of its tokenizer.json and its flags, whatever transformers makes of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from minisgl_backend.errors import ConfigError
from minisgl_backend.text.tokenizer import Tokenizer
from minisgl_backend.text.tokenizer_file import TokenizerFiles
from minisgl_backend.text.vocabulary import load_vocabulary
from tests.tokenizer_folders import BOS, END, EOS, POST_PROCESSORS, UNK, byte_level, sentencepiece, write_folder

# Whether the class sets the ends of texts by the flags, and whether BOS comes without one.
READS_FLAGS = {
    "LlamaTokenizer": True,
    "LlamaTokenizerFast": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizerFast": True,
    "GPTNeoXTokenizerFast": False,
}
KEEPS_FILE = (
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "BloomTokenizerFast",
    "PreTrainedTokenizerFast",
)
NAMES: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
FILE_ENDS = {"bos": (BOS, None), "eos": (None, EOS), "both": (BOS, EOS), "end": (None, END)}
FLAGS = ("add_bos_token", "add_eos_token")
ABSENT = object()


def ends(backend: Backend, text: str = "a") -> tuple[str | None, str | None]:
    """The special tokens in front of and behind a text without any."""
    tokens, plain = backend.encode(text).tokens, backend.encode(text, add_special_tokens=False).tokens
    at = next(i for i in range(len(tokens)) if tokens[i : i + len(plain)] == plain)
    front, back = tokens[:at], tokens[at + len(plain) :]
    assert len(front) <= 1
    assert len(back) <= 1
    return front[0] if front else None, back[0] if back else None


def make(folder: Path, config: dict[str, Any], **options: Any) -> Path:
    return write_folder(folder, options.pop("backend", None) or byte_level(), NAMES | config, **options)


def loaded(folder: Path) -> Backend:
    return TokenizerFiles(folder).backend


@pytest.mark.parametrize("name", [*READS_FLAGS, *KEEPS_FILE])
def test_ends_by_class_and_flags(tmp_path: Path, name: str) -> None:
    values = (ABSENT, True, False, None)
    for number, (bos, eos, post_processor) in enumerate(itertools.product(values, values, POST_PROCESSORS)):
        flags = {key: value for key, value in zip(FLAGS, (bos, eos), strict=True) if value is not ABSENT}
        options = {"tokenizer_class": name, **flags}
        folder = make(tmp_path / str(number), options, post_processor=post_processor)
        expected = FILE_ENDS.get(post_processor, (None, None))
        if name in READS_FLAGS:
            first, last = flags.get(FLAGS[0], READS_FLAGS[name]), flags.get(FLAGS[1], False)
            expected = BOS if first else None, EOS if last else None
        backend = loaded(folder)
        assert ends(backend) == expected, (flags, post_processor)
        if name in READS_FLAGS:
            one = [token for token in (expected[0], "a", expected[1]) if token]
            assert backend.encode("a", "a").tokens == one * 2


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "TokenizersBackend"}, {"tokenizer_class": "Unknown"}])
@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
def test_flags_stand_where_no_class_is_known_to_ignore_them(
    tmp_path: Path, config: dict[str, Any], post_processor: str
) -> None:
    now = FILE_ENDS.get(post_processor, (None, None))
    for number, flags in enumerate(({}, {FLAGS[1]: True}, {FLAGS[0]: True}, dict.fromkeys(FLAGS, False))):
        folder = make(tmp_path / str(number), config | flags, post_processor=post_processor)
        wanted = tuple(flags.get(flag, end is not None) for flag, end in zip(FLAGS, now, strict=True))
        same = wanted == (now[0] is not None, now[1] is not None)
        assert ends(loaded(folder)) == (now if same else (BOS if wanted[0] else None, EOS if wanted[1] else None))


def test_a_class_of_the_folder_that_does_not_run_reads_its_flags(tmp_path: Path) -> None:
    """As gte-Qwen2's, which puts an end token behind each text: the vector is the last token's."""
    own = {"auto_map": {"AutoTokenizer": ["own.Qwen2Tokenizer", "own.Qwen2TokenizerFast"]}}
    folder = make(tmp_path, {"tokenizer_class": "Qwen2Tokenizer", FLAGS[1]: True, **own}, post_processor="byte_level")
    assert Tokenizer(folder).encode("a") == [*Tokenizer(folder).encode("a", add_special_tokens=False), 1]


def test_a_class_of_the_folder_that_runs_gets_its_flags(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    folder = make(tmp_path, {"tokenizer_class": "Own", FLAGS[1]: True, **own}, post_processor="byte_level")
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n"
        "    def __init__(self, *args, add_eos_token=False, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        self.end = [self.eos_token_id] if add_eos_token else []\n\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        found = super().__call__(*args, **kwargs)\n"
        '        return {**found, "input_ids": found["input_ids"] + self.end}\n'
    )
    tokenizer = Tokenizer(folder, trust_remote_code=True)
    assert tokenizer.encode("a")[-1] == 1
    assert tokenizer.info()["add_eos_token"]


def test_a_folder_that_version_5_wrote_says_all_in_its_file(tmp_path: Path) -> None:
    written = {"tokenizer_class": "LlamaTokenizer", "backend": "tokenizers"}
    assert ends(loaded(make(tmp_path / "a", written, post_processor="both"))) == (BOS, EOS)
    assert ends(loaded(make(tmp_path / "b", written | {FLAGS[1]: False}, post_processor="both"))) == (BOS, None)
    assert ends(loaded(make(tmp_path / "c", written | {FLAGS[1]: True}))) == (None, EOS)
    spaces = make(tmp_path / "d", written | {"add_prefix_space": False}, backend=sentencepiece())
    assert loaded(spaces).encode("a").tokens == ["▁a"]


def test_the_class_may_stand_in_config_json(tmp_path: Path) -> None:
    model = {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"}
    folder = make(tmp_path, {}, post_processor="byte_level", model=model)
    assert ends(loaded(folder)) == (BOS, None)


def test_a_token_that_is_not_named_is_not_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(tmp_path, {"tokenizer_class": "LlamaTokenizer", "bos_token": None, FLAGS[0]: True})
    assert ends(loaded(folder)) == (None, None)
    assert "add_bos_token without naming the token" in caplog.text


def test_tokens_of_the_class_count_where_the_files_name_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sentencepiece(), {"tokenizer_class": "LlamaTokenizer", FLAGS[1]: True})
    tokenizer = Tokenizer(folder)
    assert [tokenizer.encode("a")[i] for i in (0, -1)] == [1, 2]
    assert (tokenizer.info()["bos_token"], tokenizer.info()["eos_token"]) == (BOS, EOS)
    gemma = write_folder(tmp_path / "gemma", sentencepiece(), {"tokenizer_class": "GemmaTokenizer"})
    assert Tokenizer(gemma).info()["bos_token"] is None  # "<bos>" is no token of this one


@pytest.mark.parametrize("name", [*READS_FLAGS, *KEEPS_FILE])
def test_what_is_told_of_the_ends_is_what_comes(tmp_path: Path, name: str) -> None:
    for number, flags in enumerate(({}, {FLAGS[0]: True, FLAGS[1]: True}, dict.fromkeys(FLAGS, False))):
        folder = make(tmp_path / str(number), {"tokenizer_class": name, **flags}, post_processor="both")
        expected = ends(loaded(folder))
        tokenizer = Tokenizer(folder)
        told = tokenizer.info()
        assert (told["add_bos_token"], told["add_eos_token"]) == (expected[0] == BOS, expected[1] == EOS)
        assert tokenizer.encode("a 12345") == loaded(folder).encode("a 12345").ids
        pair = loaded(folder).encode("a", "12").ids
        assert tokenizer.encode_pair("a", "12") == pair


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("GPT2Tokenizer", "exaone"),
        ("GPT2Tokenizer", "starcoder2"),
        ("GPT2TokenizerFast", "gpt2"),
        ("Qwen2Tokenizer", "qwen2"),
        ("Qwen2Tokenizer", "qwen3"),
        ("LlamaTokenizer", "llama"),
        ("LlamaTokenizerFast", "qwen2"),
        ("GemmaTokenizer", "gemma2"),
        ("CohereTokenizer", "cohere"),
        ("GPTNeoXTokenizer", "gpt_neox"),
        ("RobertaTokenizer", "roberta"),
        (None, "qwen2"),
        (None, "gpt2"),
        (None, "gemma3_text"),
    ],
)
def test_the_file_decides_how_texts_are_cut(tmp_path: Path, name: str | None, model_type: str) -> None:
    """transformers 5 puts the split of the class, or of the model's type, in its place."""
    config = {"tokenizer_class": name} if name else {}
    folder = make(tmp_path, config, backend=byte_level(digits=True), model={"model_type": model_type})
    found = Tokenizer(folder).encode("a 1245", add_special_tokens=False)
    vocabulary = load_vocabulary(folder)
    assert [vocabulary.token_text(token) for token in found] == ["a", " ", "12", "4", "5"]
    assert vocabulary.decode(found) == Tokenizer(folder).decode(found) == "a 1245"


@pytest.mark.parametrize(
    ("written", "flag", "expected"), [(True, ABSENT, "a"), (False, True, "Ġa"), (True, None, "Ġa")]
)
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_space_in_front_by_the_flag(tmp_path: Path, written: bool, flag: Any, expected: str, name: str) -> None:
    config = {"tokenizer_class": name, **({} if flag is ABSENT else {"add_prefix_space": flag})}
    folder = make(tmp_path, config, backend=byte_level(prefix_space=written))
    assert loaded(folder).encode("a").tokens == [expected]


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("with_model", [False, True])
def test_llamas_space_in_front_by_its_flags(tmp_path: Path, metaspace: bool, with_model: bool) -> None:
    for number, (flag, legacy) in enumerate(itertools.product((ABSENT, None, True, False), (ABSENT, True, False))):
        config = {"add_prefix_space": flag, "legacy": legacy}
        config = {key: value for key, value in config.items() if value is not ABSENT}
        folder = make(
            tmp_path / str(number),
            {"tokenizer_class": "LlamaTokenizer", **config},
            backend=sentencepiece(metaspace=metaspace),
        )
        if with_model:
            (folder / "tokenizer.model").touch()
        tokens = loaded(folder).encode("a</s>a", add_special_tokens=False).tokens
        first = "a" if flag is False else "▁a"
        is_new = legacy is False if with_model and isinstance(flag, bool) else metaspace
        assert tokens == [first, EOS, "a" if is_new else first], config


def test_neither_cut_nor_padded(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=20, pad_id=3, pad_token=END)
    options = {"tokenizer_class": "Qwen2Tokenizer", "padding_side": "left", "truncation_side": "left"}
    tokenizer = Tokenizer(make(tmp_path, options, backend=backend))
    assert len(tokenizer.encode("bcdefg")) == 6
    assert len(tokenizer.encode_pair("bcdefg", "bcdefg")) == 12


def test_special_tokens_are_split_where_the_file_says_so(tmp_path: Path) -> None:
    for number, split in enumerate((True, False)):
        options = {"tokenizer_class": "LlamaTokenizer", "split_special_tokens": split}
        found = Tokenizer(make(tmp_path / str(number), options)).encode("b</s>", add_special_tokens=False)
        assert (found[-1] == 1) is not split


def test_tokens_that_the_other_files_add(tmp_path: Path) -> None:
    listed = {"300": {"content": "<new>", "special": True}, "301": {"content": "<word>", "rstrip": True}}
    more = {"additional_special_tokens": ["<more>"]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **more}
    folder = make(tmp_path / "a", config | {"added_tokens_decoder": listed})
    tokenizer, vocabulary = Tokenizer(folder), load_vocabulary(folder)
    found = tokenizer.encode("b<new><word> <more>")
    assert [vocabulary.token_text(token) for token in found[1:]] == ["<new>", "<word>", "<more>"]
    assert {"<new>", "<more>"} <= set(tokenizer.special_tokens) & set(vocabulary.special_tokens)
    assert "<word>" not in tokenizer.special_tokens
    assert "<word>" in tokenizer.added_tokens
    assert vocabulary.decode(found) == "b<word>"

    older = make(tmp_path / "b", config)
    (older / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}, **more}))
    (older / "added_tokens.json").write_text(json.dumps({"<old>": 400}))
    tokenizer = Tokenizer(older)
    assert tokenizer.info()["eos_token"] == END
    assert not loaded(older).get_added_tokens_decoder()[3].normalized
    assert len(tokenizer.encode("<old><more>")) == 2


@pytest.mark.parametrize(
    ("model_type", "flag", "version", "words", "warns"),
    [
        ("mistral", True, "4.50.0", ["a", "B", "1", "2"], False),
        ("mistral3", None, None, ["aB", "12"], True),
        ("mistral", False, None, ["aB", "12"], False),
        ("mistral", True, "5.0.0", ["aB", "12"], False),
        ("llama", True, None, ["aB", "12"], False),
        ("llama", None, None, ["aB", "12"], False),
    ],
)
def test_words_of_mistral_by_its_flag(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model_type: str,
    flag: Any,
    version: Any,
    words: list[str],
    warns: bool,
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "fix_mistral_regex": flag}
    model = {"model_type": model_type, "transformers_version": version}
    folder = make(tmp_path, config, backend=byte_level(digits=True), model=model)
    assert [word for word, _ in loaded(folder).pre_tokenizer.pre_tokenize_str("aB12")] == words
    assert ("fix_mistral_regex" in caplog.text) is warns


@pytest.mark.parametrize("name", READS_FLAGS)
def test_a_class_that_reads_another_file_is_told_both_flags(tmp_path: Path, name: str) -> None:
    """Those of transformers 5 have other defaults than those before."""
    (tmp_path / "tokenizer.model").touch()
    for flags in ({}, {FLAGS[0]: False}, {FLAGS[1]: True}, {FLAGS[0]: None}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **flags}))
        told = TokenizerFiles(tmp_path).flags
        assert told == {FLAGS[0]: READS_FLAGS[name], FLAGS[1]: False} | {key: bool(flags[key]) for key in flags}


def test_what_reads_a_tokenizer_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="packages sentencepiece and tiktoken"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_ends_of_words_and_merges(tmp_path: Path, name: str) -> None:
    """Without tokenizer.json; of these two only GPT-2's begins texts with BOS, as OPT's."""
    byte_level().model.save(str(tmp_path))
    config = {"tokenizer_class": name, **NAMES, FLAGS[0]: True, FLAGS[1]: True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    found = Tokenizer(tmp_path).encode("a")
    assert (found[0] == 0, found[-1] == 1) == (name == "GPT2Tokenizer", False)


def test_parts_keep_what_the_flags_do_not_name(tmp_path: Path) -> None:
    backend = byte_level()
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True, use_regex=False)
    folder = make(tmp_path, {"tokenizer_class": "GPT2Tokenizer"}, backend=backend)
    assert [word for word, _ in loaded(folder).pre_tokenizer.pre_tokenize_str("b c")] == ["bĠc"]


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"a": {"content": "b"}}},
        {"added_tokens_decoder": {"1": "b"}},
        {"additional_special_tokens": "<x>"},
        {"additional_special_tokens": [5]},
        {"extra_special_tokens": {"image_token": 5}},
        {"eos_token": 5},
        {"model_max_length": "long"},
    ],
)
def test_tokens_in_another_form_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    for load in (Tokenizer, load_vocabulary):
        with pytest.raises(ConfigError, match=f"{next(iter(config))} is .* allowed: "):
            load(folder)


@pytest.mark.parametrize("name", ["T5Tokenizer", "GPTSw3Tokenizer", "MistralCommonBackend"])
def test_a_class_that_cannot_be_made_of_the_folder_leaves_the_file(tmp_path: Path, name: str) -> None:
    """It lacks a package, or is of another kind of vocabulary."""
    tokenizer, plain = (Tokenizer(make(tmp_path / one, {"tokenizer_class": one})) for one in (name, "Unknown"))
    assert tokenizer.encode("a b") == plain.encode("a b")
    assert tokenizer.special_tokens == plain.special_tokens
    assert tokenizer.info()["tokenizer_class"] == name


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    """transformers makes a tokenizer of a few tokens."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Tokenizer(tmp_path)


def test_bytes_need_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}', encoding="utf-8")
    assert Tokenizer(tmp_path).encode("a", add_special_tokens=False) == [100]


@pytest.mark.parametrize("config", [{"tokenizer_class": ["LlamaTokenizer"]}, {"chat_template": 7}])
def test_names_and_templates_in_another_form_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(config))} is .* allowed: "):
        Tokenizer(make(tmp_path, config))


def test_a_processors_chat_template_counts_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    """Models of images and texts have it in a file of its own."""
    folder, messages = make(tmp_path, {}), [{"role": "user", "content": "a"}]
    (folder / "chat_template.json").write_text('{"chat_template": "P{{ messages[0].content }}"}', encoding="utf-8")
    assert Tokenizer(folder).render(messages) == "Pa"
    (folder / "chat_template.jinja").write_text("J{{ messages[0].content }}", encoding="utf-8")
    assert Tokenizer(folder).render(messages) == "Ja"
