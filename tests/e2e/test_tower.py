"""A picture's tiles through the real server, by a tower of transformers'."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import running_endpoint
from tests.parity.test_llm_images import PARAMS, PICTURES, expected, made
from tests.seeing import encoded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_endpoint_says_what_transformers_says(tmp_path: Path) -> None:
    folder, repository = tmp_path / "model", tmp_path / "server"
    folder.mkdir()
    repository.mkdir()
    model, seeing, processor = made("llava_next", folder)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(encoded(one)).decode()}"}}
        for one in PICTURES
    ]
    messages = [{"role": "user", "content": [parts[0], {"type": "text", "text": "and"}, parts[1]]}]
    body = {"messages": messages, "max_tokens": PARAMS.max_tokens, "temperature": 0, "ignore_eos": True}
    parameters = {"model": str(folder), "dtype": "float32", "page_size": "4", "num_pages": "200"}
    with (
        RunningServer(repository, parameters) as server,
        running_endpoint(server, workers=1) as endpoint,
    ):
        status, counted = endpoint.post("/tokenize", {"messages": messages})
        assert status == 200, counted
        said = expected(model, seeing, processor, counted["tokens"], PICTURES)
        for _ in range(2):
            status, answer = endpoint.post("/v1/chat/completions", body)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == seeing.plain.decode(said, skip_special_tokens=True)
            assert answer["usage"]["prompt_tokens"] == len(counted["tokens"])
