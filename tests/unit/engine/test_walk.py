"""How far a reader of one step has to walk: the files that a steady decode step of the core enters."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minisgl_backend
from minisgl_backend.config import EngineConfig, Environment
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.core_server import CoreServer
from minisgl_backend.ipc.messages import Submit
from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.runner.cuda_graph import EagerGraphRunner

ROOT = Path(minisgl_backend.__file__).parent
MOST_FILES = 20
CAPTURED = "_decode"  # the first function of what a captured graph holds: a replay runs none of its Python


class FakeChannel:
    """Fronts that sent three requests and only listen from then on."""

    has_backlog = False

    def __init__(self, requests: list[Request]) -> None:
        self._commands: list[Any] = [Submit(request=request) for request in requests]
        self.sent = 0

    def receive(self, timeout_ms: int) -> list[Any]:
        commands, self._commands = self._commands, []
        return commands

    def is_attached(self, front: int) -> bool:
        return True

    def take_lost(self) -> tuple[()]:
        return ()

    def send(self, front: int, event: Any) -> None:
        self.sent += 1


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


def test_a_decode_step_enters_few_files() -> None:
    config = EngineConfig(num_pages=200, max_running_requests=8, mixed_prefill_length=64)
    engine = build_engine(config, Environment.read({}))
    engine.core._runner.use_graphs(EagerGraphRunner((1, 2, 4, 8)))  # type: ignore[attr-defined]
    prompt = np.arange(5, 25, dtype="<i4").tobytes()
    params = [SamplingParams(max_tokens=100, temperature=0.7, ignore_eos=True, seed=seed) for seed in range(3)]
    channel = FakeChannel([Request(uid=uid, token_ids=prompt, params=one) for uid, one in enumerate(params)])
    server = CoreServer(engine.core, channel, engine.welcome)  # type: ignore[arg-type]
    busy = False
    for _ in range(6):
        busy = server.turn(busy)
    with tracing() as entered:
        server.turn(busy)
    engine.close()
    files = list(dict.fromkeys(entered))
    hops = sum(one != other for one, other in itertools.pairwise(entered))
    print(f"{hops} hops, {len(files)} files: {', '.join(files)}")
    assert len(files) <= MOST_FILES, files
