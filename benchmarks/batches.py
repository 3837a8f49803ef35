"""A batch beside chat streams: what the streams lose, and what the batch keeps.

    python -m benchmarks.batches [--model demo] [--lines 2000] [--streams 8] [--slowdown 1.5] [--json]
    python -m benchmarks.batches --served ...

Three runs: the streams alone, the batch alone, and both until the batch has ended. Each stream asks its next question
when it has its answer; the batch has `--batch-requests` lines on their way, as the endpoint has.

The engine runs in this process and the clock is the process' own processor time, on one thread, so that other work on
the machine changes little; `--clock wall` takes the time of day and all cores instead. With `--served` a whole server
runs, the batch is a file at /v1/batches, the streams are chats, and the clock is the time of day: client, endpoint,
server and engine share the cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.batches_served import Run, ServedLoad, Waits
from minisgl_backend import LLM, SamplingParams
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.environment import Environment
from minisgl_backend.request import MAX_PRIORITY, FinishReason, Request

CHAT_PROMPT, CHAT_ANSWER = 48, 64  # tokens on average: half to one and a half times as many
LINE_PROMPT, LINE_ANSWER = 32, 16
SLOWDOWN = EngineConfig.background_slowdown
WARM_UP_ANSWERS = 2  # of each stream, before anything is measured
LEAST_ANSWERS = 6  # of each stream alone


class EngineLoad:
    """Streams and a batch at an engine core in this process."""

    def __init__(self, core: EngineCore, clock: Callable[[], float], streams: int, batch_requests: int) -> None:
        self._core, self._clock = core, clock
        self._streams, self._batch_requests = streams, batch_requests
        self._chance = Random(0)
        self._uid = 0

    def run(self, lines: int, streams: bool, answers: int = 0) -> Run:
        """Until the batch has ended, and each stream has had `answers`."""
        self._waits, self._lines, self._done = Waits(), lines, 0
        self._of: dict[int, int] = {}  # uid -> stream; -1: a line
        self._last: dict[int, float] = {}  # uid -> when its last token came, or it was sent
        self._heard: set[int] = set()
        answered = [0] * (self._streams if streams else 0)
        for stream in range(len(answered)):
            self._ask(stream)
        for _ in range(min(lines, self._batch_requests)):
            self._ask(-1)
        begin = self._clock()
        while self._done < lines or min(answered, default=answers) < answers:
            self._core.step()
            for stream in self._take():
                if stream >= 0:
                    answered[stream] += 1
                self._ask(stream)
        seconds = self._clock() - begin
        self._core.abort(list(self._of), FinishReason.CANCELLED)
        while self._core.step():
            self._core.drain_outputs()
        self._core.drain_outputs()
        return Run(self._waits, lines, seconds)

    def _ask(self, stream: int) -> None:
        if stream < 0:
            if not self._lines:
                return
            self._lines -= 1
        prompt, answer = (CHAT_PROMPT, CHAT_ANSWER) if stream >= 0 else (LINE_PROMPT, LINE_ANSWER)
        if stream >= 0:  # else the streams would walk in step
            prompt, answer = (self._chance.randrange(mean // 2, mean + mean // 2 + 1) for mean in (prompt, answer))
        token_ids = np.array([self._chance.randrange(5, 1000) for _ in range(prompt)], dtype="<i4").tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._uid += 1
        self._of[self._uid], self._last[self._uid] = stream, self._clock()
        priority = 0 if stream >= 0 else MAX_PRIORITY
        self._core.submit(Request(uid=self._uid, token_ids=token_ids, params=params, priority=priority))

    def _take(self) -> Iterator[int]:
        """Notes what has come; the streams, or -1 for a line, of answers that have ended."""
        outputs, now = self._core.drain_outputs(), self._clock()
        if outputs is None:
            return
        for uid, reason in zip(outputs.uids.tolist(), outputs.reasons.tolist(), strict=True):
            stream = self._of[uid]
            if stream >= 0:
                waits = self._waits.gaps if uid in self._heard else self._waits.first_tokens
                waits.append(now - self._last[uid])
            self._heard.add(uid)
            self._last[uid] = now
            if reason:
                del self._of[uid], self._last[uid]
                self._heard.discard(uid)
                self._done += stream < 0
                yield stream


def compare(load: EngineLoad | ServedLoad, lines: int) -> dict[str, Any]:
    """The three runs, and what the issue of batches beside streams is judged by: ratios."""
    load.run(min(lines, 32), True, WARM_UP_ANSWERS)
    chats = load.run(0, True, LEAST_ANSWERS)
    batch = load.run(lines, False)
    both = load.run(lines, True)
    chats_again = load.run(0, True, LEAST_ANSWERS)
    alone = Waits(
        chats.waits.first_tokens + chats_again.waits.first_tokens, chats.waits.gaps + chats_again.waits.gaps
    ).figures()
    beside = both.waits.figures()
    return {
        "alone_ms": alone,
        "beside_ms": beside,
        "lines_per_s": {"alone": lines / batch.seconds, "beside": lines / both.seconds},
        "gap_p99": beside["gap_p99"] / alone["gap_p99"],
        "first_token_p50": beside["first_token_p50"] / alone["first_token_p50"],
        "batch_speed": batch.seconds / both.seconds,
    }


@contextmanager
def engine_load(options: argparse.Namespace) -> Iterator[EngineLoad]:
    import torch

    if options.clock == "processor":
        torch.set_num_threads(1)
    environment = Environment(overlap=None, log_level="WARNING", flashinfer_tensor_cores=None)
    rows = options.streams + options.batch_requests
    given: dict[str, Any] = {"background_slowdown": options.slowdown, "max_running_requests": rows + 8}
    with LLM(options.model, environment=environment, dtype=options.dtype, **given) as llm:
        clock = time.process_time if options.clock == "processor" else time.perf_counter
        yield EngineLoad(llm.engine.core, clock, options.streams, options.batch_requests)


@contextmanager
def served_load(options: argparse.Namespace) -> Iterator[ServedLoad]:
    with tempfile.TemporaryDirectory(prefix="minisgl-batches-") as folder:
        arguments = ["--background-slowdown", str(options.slowdown), "--dtype", options.dtype]
        if options.model != "demo":
            arguments += ["--model", options.model]
        arguments += ["--max-batch-requests", str(options.batch_requests)]
        with ServedLoad(Path(folder), arguments, options.streams, CHAT_ANSWER, LINE_ANSWER) as load:
            yield load


def measure(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What the command of these arguments prints."""
    options = _parser().parse_args(arguments)
    with served_load(options) if options.served else engine_load(options) as load:
        found = compare(load, options.lines)
    return {**{name: getattr(options, name) for name in ("model", "lines", "streams", "slowdown", "served")}, **found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="`demo` or a model folder [%(default)s]")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch [%(default)s]")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--batch-requests", type=int, default=16, help="lines on their way at a time [%(default)s]")
    parser.add_argument(
        "--slowdown", type=float, default=SLOWDOWN, help="background_slowdown of the engine [%(default)s]"
    )
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--served", action="store_true", help="a whole server, by the time of day")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> int:
    found = measure()
    print(json.dumps(found) if "--json" in sys.argv else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
