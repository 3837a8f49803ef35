"""A tiny model that sees, before a real server and an endpoint, and pictures for it."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import Endpoint, running_endpoint
from tests.e2e.wire import Server
from tests.seeing import SeeingModel, encoded
from tests.seeing_checkpoint import seeing_checkpoint

PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), dtype=np.uint8)) for seed in (1, 2)
]
BASE64 = [base64.b64encode(encoded(one)).decode() for one in PICTURES]
URLS = [f"data:image/png;base64,{one}" for one in BASE64]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Stack:
    """The model, and the addresses of its server and endpoint."""

    def __init__(self, model: SeeingModel, server: Server, endpoint: Endpoint) -> None:
        self.model, self.server, self.endpoint = model, server, endpoint

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.endpoint.post(path, body)
        return {**answer, "status": status}


@contextlib.contextmanager
def running_stack(folders: pytest.TempPathFactory, **settings: Any) -> Iterator[Stack]:
    """`settings`: of the endpoint."""
    model = seeing_checkpoint(folders.mktemp("model"))
    parameters = {"model": str(model.path), "page_size": "4", "num_pages": "400", "encoder_cache_mib": "1"}
    with (
        RunningServer(folders.mktemp("server"), parameters) as server,
        running_endpoint(server, workers=1, files_folder=str(folders.mktemp("files")), **settings) as endpoint,
    ):
        yield Stack(model, server, endpoint)


def part_of(url: str) -> dict[str, Any]:
    """An image of a chat."""
    return {"type": "image_url", "image_url": {"url": url}}


def messages_of(*parts: Any) -> list[dict[str, Any]]:
    """One message of the user."""
    listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": listed}]
