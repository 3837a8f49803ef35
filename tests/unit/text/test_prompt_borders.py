"""Which tokens of a chat's prompt other prompts will have, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.text.prompt_borders import MOST_REMEMBERED, PromptBorders, PromptParts
from minisgl_backend.text.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "model_repository" / "engine" / "demo_model"
THINKS = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% if enable_thinking is false %}<think></think>"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
Chat = Sequence[Mapping[str, Any]]
SYSTEM: Chat = [{"role": "system", "content": "You answer in rhymes, always, and never in prose."}]
QUESTION: Chat = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = Tokenizer(DEMO)
    if request.param is not None:
        tokenizer._tokenizer.chat_template = request.param
    return tokenizer


def ids(tokenizer: Tokenizer, chat: Chat, **arguments: Any) -> list[int]:
    return tokenizer.encode(tokenizer.render(chat, **arguments), add_special_tokens=False)


def parts(tokenizer: Tokenizer, chat: Chat, **arguments: Any) -> PromptParts:
    return PromptBorders(tokenizer).of_chat(chat, arguments, ids(tokenizer, chat, **arguments))


@pytest.mark.parametrize("tokenizer", [None, THINKS], indirect=True)
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"tools": [{"name": "look"}]}])
def test_a_later_turn_and_another_chat_have_these_tokens(tokenizer: Tokenizer, arguments: dict[str, Any]) -> None:
    chat = [*SYSTEM, *QUESTION]
    prompt, (stable, borders) = ids(tokenizer, chat, **arguments), parts(tokenizer, chat, **arguments)
    later = ids(tokenizer, [*chat, {"role": "assistant", "content": "By rays."}, *QUESTION], **arguments)
    assert 0 < stable < len(prompt)
    assert later[:stable] == prompt[:stable]
    other = ids(tokenizer, [*SYSTEM, {"role": "user", "content": "And the sea?"}], **arguments)
    assert len(borders) == 1
    assert other[: borders[0]] == prompt[: borders[0]]
    assert len(ids(tokenizer, SYSTEM, add_generation_prompt=False)) - 3 <= borders[0] < stable


@pytest.mark.parametrize("tokenizer", ["{% for m in messages %}{{ m.content }}{% endfor %}"], indirect=True)
def test_a_template_that_begins_no_answer_tells_no_end(tokenizer: Tokenizer) -> None:
    assert parts(tokenizer, QUESTION).stable_len == 0


@pytest.mark.parametrize(
    "tokenizer", ["{{ raise_exception('no') if messages | length < 3 }}{{ messages }}"], indirect=True
)
def test_a_template_that_refuses_short_chats_tells_nothing(tokenizer: Tokenizer) -> None:
    chat = [*QUESTION, {"role": "assistant", "content": "y"}, *QUESTION]
    assert parts(tokenizer, chat) == PromptParts(0, ())


@pytest.mark.parametrize("tokenizer", [THINKS], indirect=True)
def test_an_answer_that_goes_on_is_stable_to_its_end(tokenizer: Tokenizer) -> None:
    chat = [*QUESTION, {"role": "assistant", "content": "By"}]
    prompt = ids(tokenizer, chat, add_generation_prompt=False)
    assert PromptBorders(tokenizer).of_chat(chat, {"continue_final_message": True}, prompt) == PromptParts()


@pytest.mark.parametrize("tokenizer", [THINKS], indirect=True)
def test_each_beginning_is_rendered_once_and_a_bounded_number_remembered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    borders, rendered = PromptBorders(tokenizer), []
    render = tokenizer.render
    monkeypatch.setattr(
        tokenizer, "render", lambda chat, **arguments: rendered.append(chat) or render(chat, **arguments)
    )
    for turn in range(20):
        borders.of_chat([*SYSTEM, {"role": "user", "content": f"{turn}"}], {}, [1, 2, 3])
    assert len(rendered) == 4
    monkeypatch.setattr(borders, "_start", lambda begin, arguments: [1])
    for turn in range(2 * MOST_REMEMBERED):
        borders.of_chat([{"role": "system", "content": f"{turn}"}, *QUESTION], {}, [1, 2, 3])
    assert len(borders._found) <= MOST_REMEMBERED
