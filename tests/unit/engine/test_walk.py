"""How far a reader has to walk: the files that a steady decode step of the core enters, and one layer of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zmq

import minisgl_backend
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.core_server import CoreServer
from minisgl_backend.environment import Environment
from minisgl_backend.ipc.channel import CoreChannel, FrontChannel
from minisgl_backend.ipc.messages import Outputs, Submit
from minisgl_backend.models.decoder import DecoderLayer
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import Request, SamplingParams
from tests.parity.paged import PagedModel

ROOT = Path(minisgl_backend.__file__).parent
MOST_FILES = 20
MOST_FILES_OF_A_LAYER = 9
CAPTURED = "_decode"  # the first function of what a captured graph holds: a replay runs none of its Python


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[tuple[CoreChannel, FrontChannel]]:
    """Both ends of the core's sockets; the front has said Hello."""
    context: zmq.Context[Any] = zmq.Context()
    core, front = CoreChannel(tmp_path), FrontChannel(context, tmp_path)
    assert front.greet(0, timeout_ms=5000)
    yield core, front
    front.close()
    core.close()
    context.term()


@contextmanager
def tracing() -> Iterator[list[str]]:
    """Files of the package in the order in which they are entered; constructors of dataclasses are not counted."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(f"{ROOT}/"):
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name.startswith(CAPTURED) and "model_runner" in above.f_code.co_filename:
                return
            above = above.f_back
        entered.append(str(Path(name).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def test_a_decode_step_enters_few_files(channels: tuple[CoreChannel, FrontChannel]) -> None:
    config = EngineConfig(
        num_pages=200, max_running_requests=8, mixed_prefill_length=64, cuda_graph_max_bs=8, cuda_graph_max_tokens=0
    )
    engine = build_engine(config, Environment.read({"MINISGL_EAGER_GRAPHS": "1"}))
    core, front = channels
    server = CoreServer(engine.core, core, engine.welcome)
    server._heartbeat.ready(on_cpu=False)
    prompt = np.arange(5, 25, dtype="<i4").tobytes()
    busy, tokens = False, 0
    while not core.is_attached(0):
        turn(server, busy)
    for seed in range(3):
        params = SamplingParams(max_tokens=100, temperature=0.7, ignore_eos=True, seed=seed)
        front.send(Submit(request=Request(uid=seed + 1, token_ids=prompt, params=params)))
    while tokens < 12:
        busy = turn(server, busy)
        tokens += num_tokens(front)
    with tracing() as entered:
        turn(server, busy)
    assert num_tokens(front) == 3
    engine.close()
    files = list(dict.fromkeys(entered))
    hops = sum(one != other for one, other in itertools.pairwise(entered))
    print(f"{hops} hops, {len(files)} files: {', '.join(files)}")
    assert len(files) <= MOST_FILES, files


@pytest.mark.parametrize("prefill", [False, True])
def test_an_eager_layer_enters_few_files(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedModel(find_model_dir("demo"), page_size=16)
    paged.step({0: [3, 4, 5], 1: [7, 8]}, {})
    layer, inner = paged.model.model.layers[1], DecoderLayer.forward
    entered: list[str] = []

    def forward(self: DecoderLayer, *args: Any) -> Any:
        if self is not layer:
            return inner(self, *args)
        with tracing() as files:
            result = inner(self, *args)
        entered.extend(files)
        return result

    monkeypatch.setattr(DecoderLayer, "forward", forward)
    paged.step({0: [9, 9]} if prefill else {}, {} if prefill else {0: 5, 1: 6})
    files = list(dict.fromkeys(entered))
    print(f"{len(files)} files: {', '.join(files)}")
    assert 5 < len(files) <= MOST_FILES_OF_A_LAYER, files


def turn(server: CoreServer, busy: bool) -> bool:
    """One round of `CoreServer.run`."""
    with server._heartbeat.step():
        return server.turn(busy)


def num_tokens(front: FrontChannel) -> int:
    """Of the records that have come."""
    return sum(len(event.uids) // 8 for event in front.receive() if isinstance(event, Outputs))
