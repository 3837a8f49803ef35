"""Prompts to token ids: BOS once, templates in the sandbox, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.text.tokenizer import Tokenizer as PromptTokenizer
from minisgl_backend.text.vocabulary import load_vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if shout %}!{% endif %}"
)


def make_folder(path: Path, template: str | None = TEMPLATE) -> Path:
    words = ["<s>", "</s>", "[", "]", "user", "assistant", "hi", "!", "<unk>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    return PromptTokenizer(make_folder(tmp_path))


def test_bos_comes_once(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.encode("hi") == [0, 6]
    assert tokenizer.encode("<s>hi") == [0, 6]
    assert tokenizer.encode("hi", add_special_tokens=False) == [6]


def test_the_template_decides_about_bos(tokenizer: PromptTokenizer) -> None:
    rendered = tokenizer.render([{"role": "user", "content": "hi"}])
    assert rendered == "<s>[user]hi[assistant]"
    assert tokenizer.encode(rendered, add_special_tokens=False).count(0) == 1


def test_the_developers_role_is_the_systems_where_the_template_does_not_know_it(
    tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    """Most templates would drop its message, and some refuse a second one of the system."""
    system, developer, user = ({"role": role, "content": role[:3]} for role in ("system", "developer", "user"))
    assert tokenizer.render([developer, user]) == "<s>[system]dev[user]use[assistant]"
    assert tokenizer.render([system, developer, user]) == "<s>[system]sys\n\ndev[user]use[assistant]"
    assert tokenizer.render([user, developer]) == "<s>[user]use[system]dev[assistant]"
    knows = "{% if messages[0].role == 'developer' %}D{% endif %}" + TEMPLATE
    found = PromptTokenizer(make_folder(tmp_path, knows)).render([developer, user])
    assert found == "D<s>[developer]dev[user]use[assistant]"


def test_template_arguments_reach_the_template(tokenizer: PromptTokenizer) -> None:
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(message, shout=True).endswith("!")
    assert tokenizer.render(message, add_generation_prompt=False) == "<s>[user]hi"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors", "messages", "conversation", "self"])
def test_a_client_cannot_bring_its_own_template(tokenizer: PromptTokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
        tokenizer.render([{"role": "user", "content": "hi"}], **{name: "{{ 1 }}"})


def test_what_is_nested_too_deeply_is_named(tokenizer: PromptTokenizer) -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs or messages are nested"):
        tokenizer.render([{"role": "user", "content": "hi"}], tools_of_mine=nested)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% if %}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(tmp_path: Path, template: str) -> None:
    tokenizer = PromptTokenizer(make_folder(tmp_path, template))
    with pytest.raises(InvalidRequestError, match="messages"):
        tokenizer.render([{"role": "user", "content": "hi"}])


def test_without_a_template_messages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        PromptTokenizer(make_folder(tmp_path, None)).render([{"role": "user", "content": "hi"}])


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_vocabulary(tmp_path)


def test_the_vocabulary_knows_its_special_tokens(tmp_path: Path) -> None:
    words = load_vocabulary(make_folder(tmp_path))
    assert words.special_ids == {0, 1}
    assert words.token_text(6) == "hi"
    assert words.token_text(99) == ""


def test_content_parts_are_joined(tokenizer: PromptTokenizer) -> None:
    parts = [{"type": "text", "text": "hi"}, "!"]
    assert tokenizer.render([{"role": "user", "content": parts}]) == "<s>[user]hi\n![assistant]"
    assert tokenizer.render([{"role": "user", "content": []}]) == "<s>[user][assistant]"
    assert tokenizer.render([{"role": "user"}]) == "<s>[user][assistant]"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0] has type 'image_url'"),
        ({"role": "user", "content": ["a", {"text": "b"}]}, "messages[0].content[1] is {'text': 'b'}"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text is None"),
        ({"role": "user", "content": 5}, "messages[0].content is 5"),
        ({"content": "hi"}, "messages[0] is {'content': 'hi'}"),
        ("hi", "messages[0] is 'hi'"),
    ],
)
def test_other_contents_are_refused_by_name(tokenizer: PromptTokenizer, message: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render([message])
    assert named in str(caught.value)
