"""What the detokenizer tells the fronts, and when."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.delivery.client_checks import ClientChecks
from minisgl_backend.delivery.text_output import TextOutputEncoder
from minisgl_backend.ipc.acks import AckReceiver, AckSender
from minisgl_backend.ipc.messages import CANCELLED
from minisgl_backend.ipc.wire import Chunk, Codec, Part, TextOptions
from minisgl_backend.text.vocabulary import Vocabulary


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A detokenizer model whose front listens at `front`."""
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
    made.front = AckReceiver(tmp_path, 0)
    made.start(TextOutputEncoder(vocabulary), ClientChecks(), AckSender(tmp_path))
    yield made
    made.finalize()
    made.front.close()
    sys.modules.pop(name)


def request(chunk: Chunk, is_cancelled: Callable[[], bool] = lambda: False) -> SimpleNamespace:
    packed = Codec().pack(chunk).reshape(1, -1)
    return SimpleNamespace(tensor=SimpleNamespace(as_numpy=lambda: packed), is_cancelled=is_cancelled)


def chunk(uid: int, number: int, *, confirm: bool) -> Chunk:
    part = Part(token_ids=np.zeros(1, dtype="<i4").tobytes())
    options = TextOptions() if number == 1 else None
    return Chunk(uid=uid, number=number, confirm=confirm, parts=(part,), options=options)


def told(model: Any) -> list[tuple[int, int]]:
    """What the front has heard since the last call."""
    uids, numbers, _ = model.front.receive()
    return list(zip(uids.tolist(), numbers.tolist(), strict=True))


def test_what_need_not_be_confirmed_by_itself_is_told_with_what_must(model: Any) -> None:
    for uid in (1, 2):
        assert model.execute([request(chunk(uid, 1, confirm=False))])[0].error is None
    assert told(model) == []
    model.execute([request(chunk(3, 1, confirm=True))])
    assert told(model) == [(1, 1), (2, 1), (3, 1)]
    model.execute([request(chunk(3, 2, confirm=True))])
    assert told(model) == [(3, 2)]


def test_what_nobody_confirms_does_not_pile_up(model: Any) -> None:
    for uid in range(1000):
        model.execute([request(chunk(uid, 1, confirm=False))])
    assert len(told(model)) == 3 * 256


def test_a_probe_is_told_at_once_with_all_before(model: Any) -> None:
    model.execute([request(chunk(1, 1, confirm=False))])
    model.execute([request(Chunk(uid=9, number=4))])
    assert told(model) == [(1, 1), (9, 4)]


@pytest.mark.parametrize(("uid", "number"), [(2**63, 1), (-1, 1), (1, 2**31), (1, -1)])
def test_a_chunk_that_no_front_has_sent_is_refused_and_leaves_nothing(model: Any, uid: int, number: int) -> None:
    assert model.execute([request(Chunk(uid=uid, number=number))])[0].error is not None
    assert model.execute([request(chunk(1, 1, confirm=True))])[0].error is None
    assert told(model) == [(1, 1)]


def test_that_a_client_has_left_is_told_at_once(model: Any) -> None:
    model.execute([request(chunk(1, 1, confirm=False))])
    model.execute([request(chunk(1, 2, confirm=False), is_cancelled=lambda: True)])
    assert told(model) == [(1, 1), (1, 2), (1, CANCELLED)]


def test_a_chunk_that_no_front_would_send_fails_alone(model: Any) -> None:
    """Whoever calls the detokenizer by itself must not take the others' text with it."""
    parts = (Part(token_ids=b"12345678"), Part(token_ids=b"12345"))
    strange = [Chunk(uid=5, number=1, parts=parts), Chunk(uid=6, number=1, parts=parts[1:], options=TextOptions())]
    good = chunk(1, 1, confirm=True)
    responses = model.execute([request(one) for one in (*strange, good)])
    assert [response.error is None for response in responses] == [False, False, True]
    assert told(model) == [(5, 1), (6, 1), (1, 1)]
