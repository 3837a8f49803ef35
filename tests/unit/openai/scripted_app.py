"""The endpoint over HTTP, in this process, before a server that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvicorn
from tritonclient.grpc import service_pb2

from benchmarks.served import free_ports
from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.app import create_app
from minisgl_backend.openai.routes.table import FAMILIES, Family
from minisgl_backend.openai.triton import Generation, ModelInfo, Prompt

PATIENCE_SECONDS = 60.0


@dataclass
class Said:
    """An answer: its pieces in order, each a text or seconds to wait; how it ends, or the server's error instead."""

    pieces: Sequence[str | float] = ("hi",)
    reason: str = "stop"
    error: str = ""
    never_ends: bool = False


@dataclass
class Call:
    """One generation, as gRPC would stream it."""

    said: Said
    left: asyncio.Event = field(default_factory=asyncio.Event)
    responses: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        pieces = list(self.said.pieces)
        last = max((number for number, piece in enumerate(pieces) if isinstance(piece, str)), default=-1)
        for number, piece in enumerate(pieces):
            is_last = number == last and not self.said.never_ends and not self.said.error
            self.responses.append(
                _response(piece, self.said.reason if is_last else None) if isinstance(piece, str) else piece
            )
        if self.said.error:
            self.responses.append(
                service_pb2.ModelStreamInferResponse(error_message=self.said.error).SerializeToString()
            )

    async def read(self) -> Any:
        while self.responses and isinstance(self.responses[0], (int, float)):
            await self._wait(self.responses.pop(0))
        if self.responses:
            return self.responses.pop(0)
        if self.said.never_ends:
            await self._wait(PATIENCE_SECONDS)
        return grpc.aio.EOF

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.left.wait(), seconds)
            raise asyncio.CancelledError

    def cancel(self) -> None:
        self.left.set()


def _response(text: str, reason: str | None) -> bytes:
    response = service_pb2.ModelInferResponse(model_name="ensemble")
    for name, datatype, value in (
        ("text_output", "BYTES", _bytes(text)),
        ("finish_reason", "BYTES", _bytes(reason or "None")),
        ("num_input_tokens", "INT32", struct.pack("<i", 3)),
        ("num_output_tokens", "INT32", struct.pack("<i", 1)),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(value)
    return bytes(service_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString())


def _bytes(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


class ScriptedServer:
    """Stands for the connection to a server."""

    def __init__(self, answer: Callable[[Prompt], Said]) -> None:
        self.answer = answer
        self.prompts: list[Prompt] = []

    def start(self, prompt: Prompt, sampling: Any, context: Any, names: Mapping[str, str], **_: Any) -> Generation:
        self.prompts.append(prompt)
        return Generation(Call(self.answer(prompt)), 1, names)

    async def tokenize(self, prompt: Prompt, *_: Any) -> dict[str, Any]:
        return {"input_ids": list(range(len(json.dumps(prompt.messages)))), "prompt_tail": [b""]}

    async def model_info(self) -> ModelInfo:
        return ModelInfo("demo", 4096, 100, "", [])

    async def is_ready(self) -> bool:
        return True

    async def close(self) -> None:
        pass


@dataclass
class ScriptedApp:
    url: str
    server: ScriptedServer

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """(status, body: JSON where it is some, else text). Bytes are sent as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data, head, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PATIENCE_SECONDS) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def events(self, method: str, path: str, body: Any = None) -> list[dict[str, Any]]:
        """The data of a stream's events."""
        status, text = self.ask(method, path, body)
        assert status == 200, text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@contextlib.contextmanager
def scripted_app(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Prompt], Said] = lambda prompt: Said(),
    **values: Any,
) -> Iterator[ScriptedApp]:
    """`values`: settings of the endpoint, and `families` of routes."""
    families: Sequence[Family] = values.pop("families", FAMILIES)
    server = ScriptedServer(answer)
    monkeypatch.setattr("minisgl_backend.openai.endpoint.TritonServer", lambda *_, **__: server)
    settings = {"served_model_names": ("demo",), "reasoning_parser": "none", "state_folder": str(folder), **values}
    (port,) = free_ports(1)
    app = create_app(EndpointSettings(**settings), families)
    runner = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not runner.started:
            assert time.monotonic() < deadline
            assert thread.is_alive()
            time.sleep(0.01)
        yield ScriptedApp(f"http://127.0.0.1:{port}", server)
    finally:
        runner.should_exit = True
        thread.join(PATIENCE_SECONDS)
