"""What the detokenizer tells the fronts, and when."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.engine.messages import CANCELLED
from minisgl_backend.serving.answers import AnswerEncoder
from minisgl_backend.serving.client_checks import ClientChecks
from minisgl_backend.serving.wire import Chunk, Codec, Part, TextOptions
from minisgl_backend.text.vocabulary import Vocabulary


class Told:
    """Looks like a HandledSender."""

    has_untold = False

    def __init__(self) -> None:
        self.messages: list[list[tuple[int, int]]] = []

    def send(self, uids: Sequence[int], numbers: Sequence[int], found_at: float) -> None:
        self.messages.append(list(zip(uids, numbers, strict=True)))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A detokenizer model whose messages are in `told.messages`."""
    backend = ModuleType("triton_python_backend_utils")
    backend.__dict__.update(
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
        TritonError=type("TritonError", (), {"INVALID_ARG": 3, "INTERNAL": 13, "__init__": lambda self, *_: None}),
        get_input_tensor_by_name=lambda request, name: request.tensor,
    )
    name = "minisgl_backend.serving.detokenizer_model"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    made = importlib.import_module(name).TritonPythonModel()
    vocabulary = Vocabulary(lambda ids, skip: "x" * len(ids), [b"x"], frozenset(), byte_exact=True)
    made.start(AnswerEncoder(vocabulary), ClientChecks(), made_told := Told())
    made.told = made_told
    yield made
    sys.modules.pop(name)


def request(chunk: Chunk, is_cancelled: Callable[[], bool] = lambda: False) -> SimpleNamespace:
    packed = Codec().pack(chunk).reshape(1, -1)
    return SimpleNamespace(tensor=SimpleNamespace(as_numpy=lambda: packed), is_cancelled=is_cancelled)


def chunk(uid: int, number: int, *, confirm: bool) -> Chunk:
    part = Part(token_ids=np.zeros(1, dtype="<i4").tobytes())
    options = TextOptions() if number == 1 else None
    return Chunk(uid=uid, number=number, confirm=confirm, parts=(part,), options=options)


def test_what_need_not_be_confirmed_by_itself_is_told_with_what_must(model: Any) -> None:
    for uid in (1, 2):
        assert model.execute([request(chunk(uid, 1, confirm=False))])[0].error is None
    assert model.told.messages == []
    model.execute([request(chunk(3, 1, confirm=True))])
    model.execute([request(chunk(3, 2, confirm=True))])
    assert model.told.messages == [[(1, 1), (2, 1), (3, 1)], [(3, 2)]]


def test_what_nobody_confirms_does_not_pile_up(model: Any) -> None:
    for uid in range(1000):
        model.execute([request(chunk(uid, 1, confirm=False))])
    assert [len(message) for message in model.told.messages] == [256, 256, 256]


def test_a_probe_is_told_at_once_with_all_before(model: Any) -> None:
    model.execute([request(chunk(1, 1, confirm=False))])
    model.execute([request(Chunk(uid=9, number=4))])
    assert model.told.messages == [[(1, 1), (9, 4)]]


def test_that_a_client_has_left_is_told_at_once(model: Any) -> None:
    model.execute([request(chunk(1, 1, confirm=False))])
    model.execute([request(chunk(1, 2, confirm=False), is_cancelled=lambda: True)])
    assert model.told.messages == [[(1, 1), (1, 2), (1, CANCELLED)]]
