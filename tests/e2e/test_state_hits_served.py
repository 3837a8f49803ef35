"""A model with states behind the real server, with default options: what of prompts is found, by `cached_tokens`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from minisgl_backend import LLM
from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import running_endpoint
from tests.e2e.wire import Server
from tests.hybrid_chats import BEGINNING, save_hybrid, text, words

pytestmark = pytest.mark.e2e

PAGE = 64  # at most
Chat = list[dict[str, str]]
OPTIONS: dict[str, Any] = {"model": "hybrid", "temperature": 0.0, "extra_body": {"ignore_eos": True}}


class Client:
    """Asks; answers are (text, tokens of the prompt, how many of them were cached)."""

    def __init__(self, client: openai.OpenAI, server: Server) -> None:
        self._client, self.server = client, server

    def complete(self, prompt: list[int]) -> tuple[str, int, int]:
        answer = self._client.completions.create(prompt=prompt, max_tokens=6, **OPTIONS)
        return answer.choices[0].text, *self._counts(answer.usage)

    def chat(self, chat: Chat, max_tokens: int = 12, **more: Any) -> tuple[str, int, int]:
        messages: Any = chat
        options = {**OPTIONS, "extra_body": {**OPTIONS["extra_body"], **more}}
        answer = self._client.chat.completions.create(messages=messages, max_tokens=max_tokens, **options)
        return answer.choices[0].message.content or "", *self._counts(answer.usage)

    def chats(self, chats: Sequence[Chat], **more: Any) -> list[tuple[str, int, int]]:
        """All at once."""
        with ThreadPoolExecutor(len(chats)) as threads:
            return list(threads.map(lambda chat: self.chat(chat, **more), chats))

    def _counts(self, usage: Any) -> tuple[int, int]:
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    """What finds nothing."""
    with LLM(str(folder), dtype="float32", cache_type="naive") as llm:
        yield llm


@contextmanager
def served(folder: Path, at: Path, **parameters: str) -> Iterator[Client]:
    with (
        RunningServer(at, {"model": str(folder), **parameters}) as server,
        running_endpoint(server, served_model_names=("hybrid",)) as endpoint,
    ):
        yield Client(endpoint.client(), server)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with served(folder, tmp_path_factory.mktemp("server")) as found:
        yield found


def answers(alone: LLM, chats: list[Chat]) -> list[str]:
    return [one.text for one in alone.chat(chats, max_tokens=12, temperature=0.0, ignore_eos=True)]


def turns(draw: random.Random, found: Sequence[tuple[str, int, int]], chats: list[Chat]) -> list[int]:
    """Adds each chat's next turn, in which an answer lacks its end; returns what stays of the prompts."""
    for chat, (answer, *_) in zip(chats, found, strict=True):
        said = " ".join(answer.split()[:-BEGINNING]) + " "
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": text(draw, 25)}]
    return [count - BEGINNING for _, count, _ in found]


def test_of_a_shared_prompt_the_third_request_computes_less_than_a_page_and_its_own(client: Client, alone: LLM) -> None:
    draw = random.Random(0)
    shared = words(draw, 3000)
    prompts = [shared + words(draw, 40) for _ in range(3)]
    found = [client.complete(prompt) for prompt in prompts]
    assert found[0][1:] == (3040, 0)
    assert 3000 - PAGE < found[2][2] <= 3000
    expected = alone.generate(prompts, max_tokens=6, temperature=0.0, ignore_eos=True)
    assert [answer for answer, *_ in found] == [one.text for one in expected]


def test_of_a_shared_system_message_the_second_does(client: Client) -> None:
    draw = random.Random(1)
    system = {"role": "system", "content": text(draw, 3000)}
    for cached in (0, 3000, 3000):
        _, _, found = client.chat([system, {"role": "user", "content": text(draw, 40)}])
        assert cached - PAGE < found <= cached


def test_a_second_turn_among_40_chats(client: Client, alone: LLM) -> None:
    draw = random.Random(2)
    chats: list[Chat] = [[{"role": "user", "content": text(draw, 80 + 5 * index)}] for index in range(41)]
    stable = turns(draw, client.chats(chats), chats)
    found = client.chats(chats)
    for kept, (_, _, cached) in zip(stable, found, strict=True):
        assert kept - PAGE < cached
    assert [answer for answer, *_ in found[::8]] == answers(alone, chats[::8])


@pytest.mark.full
def test_a_second_turn_after_preemption(folder: Path, alone: LLM, tmp_path: Path) -> None:
    draw = random.Random(3)
    chats: list[Chat] = [[{"role": "user", "content": text(draw, 90 + 9 * index)}] for index in range(4)]
    others: list[Chat] = [[{"role": "user", "content": text(draw, 70 + index)}] for index in range(40)]
    with (
        served(folder, tmp_path, max_running_requests="4", num_state_slots="100") as client,
        ThreadPoolExecutor() as beside,
    ):
        first = beside.submit(client.chats, chats, max_tokens=700, priority=12)
        client.server.metrics_when(lambda found: found["minisgl_requests_running"] == 4)
        client.chats(others)
        stable = turns(draw, first.result(), chats)
        assert client.server.settled_metrics()["minisgl_preemptions_total"] > 0
        found = client.chats(chats)
    for kept, (_, count, cached) in zip(stable, found, strict=True):
        assert kept + 700 < count
        assert kept - PAGE < cached
    assert [answer for answer, *_ in found] == answers(alone, chats)


@pytest.mark.full
def test_answers_are_the_same_once_every_state_has_been_evicted(folder: Path, alone: LLM, tmp_path: Path) -> None:
    draw = random.Random(4)
    chats: list[Chat] = [[{"role": "user", "content": text(draw, 100 + 9 * index)}] for index in range(4)]
    others: list[Chat] = [[{"role": "user", "content": text(draw, 70 + index)}] for index in range(40)]
    with served(folder, tmp_path, max_running_requests="4", num_state_slots="6") as client:
        turns(draw, client.chats(chats), chats)
        client.chats(others)
        found = client.chats(chats)
    assert [cached for *_, cached in found] == [0] * 4
    assert [answer for answer, *_ in found] == answers(alone, chats)
