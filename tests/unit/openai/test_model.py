"""What the endpoint knows of the model behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minisgl_backend.host.openai_endpoint import EndpointSettings
from minisgl_backend.openai import model as model_module
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.triton import ModelInfo


class Server:
    """A server whose model changes; None: it does not answer."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.asked = 0

    async def model_info(self) -> ModelInfo:
        self.asked += 1
        if self.name is None:
            raise ApiError(503, "the server does not answer")
        return ModelInfo(model=self.name, max_model_len=4096, vocab_size=1000, chat_template="", added_tokens=[])


def resolve(model: ServedModel, name: str | None = None) -> str:
    return asyncio.run(model.resolve(name))


def test_a_server_may_come_back_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server("one")
    model = ServedModel(server, EndpointSettings(port=0))
    for _ in range(3):
        assert resolve(model) == "one"
    assert server.asked == 1
    monkeypatch.setattr(model_module, "_INFO_SECONDS", 0.0)
    server.name = None
    assert resolve(model, "one") == "one"
    server.name = "two"
    assert resolve(model, "two") == "two"
    with pytest.raises(ApiError, match="'one', which is not served here; allowed: two"):
        resolve(model, "one")


@pytest.mark.parametrize(("is_guided", "kind"), [(False, "reasoning"), (True, "content")])
def test_what_a_grammar_allows_is_no_thought_that_the_prompt_began(is_guided: bool, kind: str) -> None:
    server: Any = Server("one")
    model = ServedModel(server, EndpointSettings(port=0, reasoning_parser="deepseek_r1"))
    new_parser = asyncio.run(model.reasoning_parser({}, is_guided=is_guided))
    assert new_parser is not None
    assert [part.kind for part in new_parser().feed('{"a": 1} ')] == [kind]


def test_a_server_that_never_answered_is_asked_again() -> None:
    server: Any = Server(None)
    model = ServedModel(server, EndpointSettings(port=0))
    for _ in range(2):
        with pytest.raises(ApiError, match="does not answer"):
            resolve(model)
    server.name = "one"
    assert resolve(model) == "one"
