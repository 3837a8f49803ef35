"""Which requests of the tokenizer wait for which."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.images.front import ImageFront
from minisgl_backend.models.config import GenerationDefaults
from minisgl_backend.serving.codec import RequestCodec
from minisgl_backend.serving.prompt_settings import CodecSettings
from tests.seeing import SeeingModel, picture

IN_IT = f"data:image/png;base64,{base64.b64encode(picture(90, 60)).decode()}"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    backend = ModuleType("triton_python_backend_utils")
    backend.__dict__.update(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        TritonError=type("TritonError", (str,), {"__new__": lambda cls, text, *_: str(text), "UNAVAILABLE": 14}),
    )
    names = [f"minisgl_backend.serving.{name}" for name in ("tokenizer_model", "responses")]
    for name in names:  # another test's may have that one's backend
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    made = importlib.import_module(names[0]).TritonPythonModel()
    seeing = SeeingModel("qwen2_vl", "bytes", tmp_path)
    front = ImageFront(seeing.path, seeing.tokenizer, num_workers=1, media_domains=["a.example"])
    settings = CodecSettings(
        max_seq_len=1000, vocab_size=len(seeing.plain), eos_token_ids=(), generation=GenerationDefaults()
    )
    with contextlib.closing(front):
        made.start(RequestCodec(seeing.tokenizer, settings, images=front), seeing.tokenizer, front)
        yield made
        made.finalize()
    for name in names:
        sys.modules.pop(name)


def request(url: str, answers: queue.SimpleQueue[tuple[str, Any]]) -> SimpleNamespace:
    """It asks for the prompt's tokens alone."""
    values = {"text_input": "x", "image_url_input": url}
    tensors = [
        SimpleNamespace(name=lambda name=name: name, as_numpy=lambda text=text: np.array([[text.encode()]], object))
        for name, text in values.items()
    ]
    return SimpleNamespace(
        inputs=lambda: tensors,
        requested_output_names=lambda: ["input_ids"],
        parameters=lambda: "",
        timeout=lambda: 0,
        request_id=lambda: "",
        get_response_sender=lambda: SimpleNamespace(send=lambda response, flags: answers.put((url, response.error))),
    )


def test_images_in_requests_never_wait_for_slow_hosts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    goes_on = threading.Event()

    async def fetch_all(_: Any, urls: list[tuple[str, str]], max_bytes: int) -> list[bytes]:
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        return [picture(90, 60) for _ in urls]

    monkeypatch.setattr("minisgl_backend.images.fetch.ImageFetcher.fetch_all", fetch_all)
    web = "https://a.example/x.png"
    try:
        model.execute([request(web, answers) for _ in range(40)])
        refused = [answers.get(timeout=30) for _ in range(8)]
        assert {url for url, _ in refused} == {web}
        assert all("image_url_input[0] is a URL, and 32 requests wait for theirs" in error for _, error in refused)
        model.execute([request(IN_IT, answers)])
        assert answers.get(timeout=30) == (IN_IT, None)
    finally:
        goes_on.set()
    assert [answers.get(timeout=30) for _ in range(32)] == [(web, None)] * 32
