"""Drives an engine core directly, step by step, with token ids: what every engine benchmark stands on."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import build_engine
from minisgl_backend.environment import Environment
from minisgl_backend.request import Content, Request, SamplingParams


@dataclass
class Timeline:
    """When one sequence was submitted and when each of its tokens came; seconds of time.perf_counter."""

    submitted: float
    tokens: list[float] = field(default_factory=list)
    done: bool = False


class Driver:
    """One engine in this process. Options are those of EngineConfig; weights are random unless told otherwise."""

    def __init__(self, model: Path, *, owns_process: bool = False, **options: Any) -> None:
        """`owns_process`: as in the process of an engine core."""
        started = time.perf_counter()
        options.setdefault("dummy_weights", True)
        self.config = EngineConfig(model=str(model), **options)
        environment = Environment.read({**os.environ, "LOG_LEVEL": os.environ.get("LOG_LEVEL", "WARNING")})
        self.engine = build_engine(self.config, environment, owns_process=owns_process)
        self.core = self.engine.core
        self.start_seconds = time.perf_counter() - started
        self.timelines: dict[int, Timeline] = {}
        self._next_uid = 1

    def submit(
        self,
        token_ids: list[int],
        max_tokens: int,
        temperature: float = 0.0,
        contents: tuple[Content, ...] = (),
        **sampling: Any,
    ) -> int:
        """contents: images in the prompt; `sampling`: more fields of SamplingParams."""
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        options = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True, "seed": uid, **sampling}
        params = SamplingParams(**options)
        self.timelines[uid] = Timeline(time.perf_counter())
        packed = np.asarray(token_ids, dtype="<i4").tobytes()
        self.core.submit(Request(uid=uid, token_ids=packed, params=params, contents=contents))
        return uid

    def step(self) -> bool:
        """One turn of the engine's loop; notes when tokens came. False: idle."""
        busy = self.core.step()
        outputs = self.core.drain_outputs()
        if outputs is not None:
            now = time.perf_counter()
            for uid, reason in zip(outputs.uids.tolist(), outputs.reasons.tolist(), strict=True):
                timeline = self.timelines[uid]
                timeline.tokens.append(now)
                timeline.done = reason != 0
        rejected = self.core.take_rejected()
        if rejected:
            raise RuntimeError(rejected[0].message)
        return busy

    def wait_for_grammars(self) -> float:
        """Waits until the grammars of all that was submitted are compiled; seconds."""
        started = time.perf_counter()
        grammars = self.core._grammars
        while grammars is not None and grammars.num_ready < grammars.num_compiling:
            time.sleep(0.0005)
        return time.perf_counter() - started

    def run(self) -> float:
        """Steps until everything submitted is answered; seconds."""
        started = time.perf_counter()
        while self.step():
            pass
        return time.perf_counter() - started

    def clear(self) -> None:
        self.timelines.clear()

    def close(self) -> None:
        """Ends the engine and gives its device memory back, so that another one can follow in this process."""
        self.engine.close()
        del self.engine, self.core
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
