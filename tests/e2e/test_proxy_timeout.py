"""Streams that wait for a minute behind a proxy which gives up on a server that says nothing for 15 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.openai_stack import running_endpoint, scripted_server
from tests.e2e.proxy import running_proxy
from tests.e2e.wire import idle

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(600)]

READ_SECONDS, WAIT_SECONDS, RATE = 15.0, 60.0, 20
MESSAGES: Any = [{"role": "user", "content": "hello"}]
PATIENCE: Any = {"api_key": "none", "max_retries": 0, "timeout": 300.0}
MODEL: Any = {"model": "demo", "stream": True}


def of_chat(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", **PATIENCE)
    chunks = client.chat.completions.create(messages=MESSAGES, max_tokens=5, **MODEL)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def of_completions(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", **PATIENCE)
    return "".join(chunk.choices[0].text for chunk in client.completions.create(prompt="hello", max_tokens=5, **MODEL))


def of_responses(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", **PATIENCE)
    events = list(client.responses.create(input="hello", max_output_tokens=5, **MODEL))
    assert events[-1].type == "response.incomplete"
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def of_messages(url: str) -> str:
    client = anthropic.Anthropic(base_url=url, **PATIENCE)
    with client.messages.stream(model="demo", messages=MESSAGES, max_tokens=5) as events:
        return events.get_final_text()


def test_a_stream_that_waits_survives_a_proxys_read_timeout(tmp_path: Path) -> None:
    clients: list[Callable[[str], str]] = [of_chat, of_completions, of_responses, of_messages]
    options = {"null_runner_rate": str(RATE), "max_running_requests": "1"}
    with (
        scripted_server(tmp_path, ["and so on "], options) as server,
        running_endpoint(server, served_model_names=("demo",)) as endpoint,
        running_proxy(endpoint.url, read_timeout=READ_SECONDS) as url,
        ThreadPoolExecutor() as pool,
    ):
        first = endpoint.client().completions.create(
            model="demo", prompt="x", max_tokens=round((WAIT_SECONDS + 5) * RATE), stream=True
        )
        next(iter(first))
        reader = threading.Thread(target=lambda: list(first))
        reader.start()
        begun = time.monotonic()
        answers = [pool.submit(client, url) for client in clients]
        server.wait_for(lambda found: found["minisgl_requests_waiting"] == len(clients))
        said = [answer.result() for answer in answers]
        assert time.monotonic() - begun > WAIT_SECONDS
        reader.join()
        assert all(text.startswith("and so") for text in said), said
        server.wait_for(idle)
