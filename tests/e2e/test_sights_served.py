"""The demo model with eyes through the real server: right answers by Triton, OpenAI's API and Anthropic's."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.gauge import SIGHTS, Messages, ask_of
from client import Client
from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import Endpoint, running_endpoint
from tests.sights import SeenFile, wrong_ones

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Ask = Callable[[Messages], str]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    parameters = {"model": "demo-vl", "page_size": "16", "num_pages": "600"}
    with (
        RunningServer(tmp_path_factory.mktemp("server"), parameters) as server,
        running_endpoint(server, workers=1) as found,
    ):
        yield found


def by_triton(endpoint: Endpoint) -> Ask:
    client = Client(f"127.0.0.1:{endpoint.server.grpc}")
    limits = {"max_tokens": SIGHTS.max_tokens, "temperature": 0.0}
    return lambda messages: client.generate(messages=list(messages), **limits).text  # type: ignore[arg-type]


def by_openai(endpoint: Endpoint) -> Ask:
    def ask(messages: Messages) -> str:
        answer = _posted(endpoint, "/v1/chat/completions", messages)
        return str(answer["choices"][0]["message"]["content"])

    return ask


def by_anthropic(endpoint: Endpoint) -> Ask:
    def ask(messages: Messages) -> str:
        blocks = [{**one, "content": [_block(part) for part in one["content"]]} for one in messages]
        return str(_posted(endpoint, "/v1/messages", blocks)["content"][0]["text"])

    return ask


def _posted(endpoint: Endpoint, path: str, messages: Messages) -> Any:
    body = {"model": "demo-vl", "messages": list(messages), "max_tokens": SIGHTS.max_tokens, "temperature": 0}
    status, answer = endpoint.post(path, body)
    assert status == 200, answer
    return answer


def _block(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


@pytest.mark.parametrize("door", [by_triton, by_openai, by_anthropic])
def test_right_answers(endpoint: Endpoint, door: Callable[[Endpoint], Ask], request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full")
    asked, ask = ask_of(SIGHTS, 100 if full else 2, seed=3), door(endpoint)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [one.messages for one in asked]))
    for kind in SIGHTS.kinds:
        of_kind = [(one, said) for one, said in zip(asked, answers, strict=True) if one.kind == kind]
        wrong = [f"{one.text!r} -> {said!r}" for one, said in of_kind if not one.is_right(said)]
        assert len(wrong) <= max(1, 0.03 * len(of_kind)), (kind, wrong)


@pytest.mark.full  # in this process: tests/gauge
def test_files_are_seen_as_a_person_sees_them(endpoint: Endpoint) -> None:
    ask = by_openai(endpoint)

    def ask_about(file: SeenFile) -> str:
        url = f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": file.question}]
        return ask([{"role": "user", "content": parts}])

    assert not wrong_ones(ask_about)
