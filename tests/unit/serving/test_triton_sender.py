"""What one request says to Triton: nothing after its last response, not even a question."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minisgl_backend.ipc.wire import Chunk, Codec

FINAL = 1


class Server:
    """Triton's side of a response sender: notes what it hears, and answers questions when it is allowed to."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    def send(self, response: object = None, flags: int = 0) -> None:
        self.heard.append("final" if flags & FINAL else "response")

    def is_cancelled(self) -> bool:
        self.heard.append("question")
        self.answers.wait(5.0)
        self.heard.append("answer")
        return True


@pytest.fixture
def sender_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    backend = ModuleType("triton_python_backend_utils")
    backend.__dict__.update(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        TritonError=type("TritonError", (), {"INTERNAL": 13, "__init__": lambda self, *_: None}),
    )
    names = ("engine_model", "metrics", "responses")  # those that import it
    for name in names:
        monkeypatch.delitem(sys.modules, f"minisgl_backend.serving.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    yield importlib.import_module("minisgl_backend.serving.engine_model")._TritonSender
    for name in names:
        sys.modules.pop(f"minisgl_backend.serving.{name}", None)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_asked_after_the_last_response(sender_class: Any, fails: bool) -> None:
    server = Server()
    sender = sender_class(server, Codec())
    assert sender.is_cancelled()
    sender.send(Chunk(uid=1, number=1), {}, False)
    if fails:
        sender.fail("INTERNAL", "no")
    else:
        sender.send(Chunk(uid=1, number=2), {}, True)
    assert not sender.is_cancelled()
    assert server.heard == ["question", "answer", "response", "final"]


def test_a_request_may_end_without_a_response(sender_class: Any) -> None:
    server = Server()
    sender = sender_class(server, Codec())
    sender.end()
    assert not sender.is_cancelled()
    assert server.heard == ["final"]


def test_the_last_response_waits_for_the_answer_to_a_question(sender_class: Any) -> None:
    server = Server()
    server.answers.clear()
    sender = sender_class(server, Codec())
    asks = threading.Thread(target=sender.is_cancelled)
    asks.start()
    while not server.heard:
        time.sleep(0.001)
    ends = threading.Thread(target=sender.send, args=(Chunk(uid=1, number=1), {}, True))
    ends.start()
    sender.send(Chunk(uid=1, number=1), {}, False)
    ends.join(0.1)
    assert server.heard == ["question", "response"], "others are not held up"
    server.answers.set()
    asks.join()
    ends.join()
    assert server.heard == ["question", "response", "answer", "final"]
