"""Images of requests before the server gets them: how many, which are read, what errors are called, what counts."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from minisgl_backend.openai.image_errors import image_code
from minisgl_backend.openai.triton import ModelInfo
from tests.unit.openai.scripted_app import Said, ScriptedApp, scripted_app

URL = f"data:image/png;base64,{base64.b64encode(b'some picture').decode()}"
ELSEWHERE = "http://nowhere.invalid/a.png"


def chat(*urls: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url} for url in urls]}]}


def blocks(*sources: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "image", "source": source} for source in sources]
    return {"messages": [{"role": "user", "content": content}]}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedApp]:
    with scripted_app(tmp_path, monkeypatch, media_domains=("*",), files_folder=str(tmp_path)) as app:
        yield app


def seeing(app: ScriptedApp, max_images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def info() -> ModelInfo:
        return msgspec.structs.replace(ModelInfo("demo", 4096, 100, "", []), max_images=max_images)

    monkeypatch.setattr(app.server, "model_info", info)


def test_images_are_counted_before_one_is_fetched(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing(app, 2, monkeypatch)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": ELSEWHERE}] * 3}
    for path, body, param in (
        ("/v1/chat/completions", chat(ELSEWHERE, ELSEWHERE, ELSEWHERE), "messages"),
        ("/tokenize", chat(ELSEWHERE, ELSEWHERE, ELSEWHERE), "messages"),
        ("/v1/responses", {"input": [item]}, "input"),
    ):
        status, answer = app.ask("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert "is image 3 of 3; allowed: 2 a request (max_images)" in answer["error"]["message"]
    status, answer = app.ask(
        "POST", "/v1/messages", {"max_tokens": 3, **blocks(*[{"type": "url", "url": ELSEWHERE}] * 3)}
    )
    assert status == 400
    assert answer["error"]["message"].startswith("messages[0].content[2].source.url is image 3 of 3")
    status, answer = app.ask("POST", "/v1/chat/completions", chat(ELSEWHERE))
    assert (status, answer["error"]["code"]) == (400, "invalid_image_url")
    assert "which has no public address" in answer["error"]["message"]


def test_nothing_is_read_for_a_model_without_eyes(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses them itself, by part."""
    seeing(app, 0, monkeypatch)
    assert app.ask("POST", "/v1/chat/completions", chat(ELSEWHERE, "file-nowhere"))[0] == 200
    (prompt,) = app.server.prompts
    assert [(one.data, one.url) for one in prompt.images] == [(b"", ""), (b"", "")]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", "invalid_image_url"),
        ("ftp://a.b/c.png", "invalid_image_url"),
        ("http://127.0.0.1/a.png", "invalid_image_url"),
        ("http://2130706433/a.png", "invalid_image_url"),
        ("http://me@a.b/c.png", "invalid_image_url"),
        ("", "invalid_image_url"),
        ("data:image/png;base64,!!!!", "invalid_base64_image"),
        ("data:image/png;base64,", "empty_image_file"),
        (f"data:image/png;base64,{'A' * (28 << 20)}", "image_file_too_large"),
    ],
)
def test_codes_of_what_cannot_be_read(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch, url: str, code: str) -> None:
    seeing(app, 20, monkeypatch)
    status, answer = app.ask("POST", "/v1/chat/completions", chat({"url": url}))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, "messages"), answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_file_that_is_none(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing(app, 20, monkeypatch)
    part = {"type": "input_image", "file_id": "file-nowhere"}
    status, answer = app.ask("POST", "/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert (status, answer["error"]["code"]) == (400, "image_file_not_found")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("messages[0].content[0].image_url.url is no image that is served; allowed: JPEG", "invalid_image_format"),
        ("messages[0].content[1].image_url cannot be decoded (OSError: x); allowed: a whole", "image_parse_error"),
        ("image[0] took a worker down (it ended); allowed: a smaller file", "image_parse_error"),
        ("messages[0].content[0].image_url is 30000x30000; allowed: at most 50000000 pixels", "image_too_large"),
        ("messages[0].content[0].image_url is 1x20000; allowed: a longer side of at most 200 times", "invalid_image"),
        ("messages[0].content[0].image_url is no text; allowed: text, as this model has no image encoder", None),
        ("messages[0].content[0] has type 'video_url', which is not served: this server has no video", None),
        ("temperature is 1000; allowed: 0 to 100", None),
        ("max_tokens has 5 bytes; allowed: 7", None),
    ],
)  # fmt: skip
def test_codes_of_what_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, code: str | None
) -> None:
    assert image_code(message) == code
    if code is not None:
        with scripted_app(tmp_path, monkeypatch, lambda prompt: Said((), error=message)) as app:
            status, answer = app.ask("POST", "/v1/chat/completions", chat(URL))
            assert (status, answer["error"]["code"]) == (400, code), answer


def test_short_answers_count_as_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_app(tmp_path, monkeypatch, max_requests=0) as app:
        for path, body in (
            ("/tokenize", chat(URL)),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/messages/count_tokens", blocks({"type": "url", "url": URL})),
        ):
            assert app.ask("POST", path, body)[0] == 429, path


def test_batches_with_images(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may be as long as a body with images; errors have their codes."""
    seeing(app, 20, monkeypatch)
    large = f"data:image/png;base64,{base64.b64encode(bytes(13 << 20)).decode()}"
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": chat(url)}
        for name, url in (("good", large), ("bad", "data:image/png;base64,"))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1), batch
    failed = json.loads(client.files.content(batch.error_file_id).text)
    assert failed["custom_id"] == "bad"
    assert failed["response"]["body"]["error"]["code"] == "empty_image_file"


def test_echo_repeats_the_words_beside_images(app: ScriptedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing(app, 20, monkeypatch)
    (user,), image = chat(URL)["messages"], {"type": "image_url", "image_url": URL}
    for content in ("It is", [image, {"type": "text", "text": "It is"}]):
        options = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
        body = {"messages": [user, {"role": "assistant", "content": content}], **options}
        status, answer = app.ask("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "It ishi"
