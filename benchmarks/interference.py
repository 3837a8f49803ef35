"""Streams that run beside a long prompt: how long they wait for a token while it is read.

    python -m benchmarks.interference [--streams 8] [--prompt-tokens 3000] [--json]

A wait of 1 step means that every step brought every stream a token. `--json` prints one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np

from minisgl_backend import LLM, SamplingParams
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.environment import Environment
from minisgl_backend.request import Request

WARM_UP_STEPS = 30  # the streams alone, before the long prompt comes
STREAM_PROMPT, STREAM_ANSWER = 20, 500  # tokens; the streams outlast the long prompt
LAYOUTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "mixed, chunks of 128": {"mixed_prefill_length": 128},
    "prompts first, chunks of 512": {"mixed_prefill_length": 0, "max_prefill_length": 512},
    "prompts first, at once": {"mixed_prefill_length": 0},
}


@dataclass(frozen=True)
class Figures:
    """One run. Waits are those of the worst stream, from the long prompt's arrival to its first token."""

    longest_wait_steps: int
    longest_wait_ms: float
    usual_wait_ms: float  # median before the long prompt
    chunk_step_ms: float  # median of the steps that computed a part of the long prompt
    longest_chunk_step_ms: float
    chunk_steps: int
    first_token_ms: float  # of the long prompt


class _Watch:
    """Steps a core, and notes when each stream gets its tokens."""

    def __init__(self, core: EngineCore, streams: range) -> None:
        self._core = core
        self._last = dict.fromkeys(streams, (0, time.perf_counter()))  # uid -> step and time of its last token
        self._step = 0
        self.waits: list[tuple[int, float]] = []  # steps and seconds between two tokens of a stream
        self.chunk_steps: list[float] = []  # seconds
        self.heard: set[int] = set()

    def step(self) -> None:
        """One turn of the engine's loop."""
        begin = time.perf_counter()
        self._core.step()
        now = time.perf_counter()
        self._step += 1
        if self._core.stats().prefill_tokens:
            self.chunk_steps.append(now - begin)
        outputs = self._core.drain_outputs()
        for uid in [] if outputs is None else outputs.uids.tolist():
            self.heard.add(uid)
            if uid in self._last:
                step, at = self._last[uid]
                self.waits.append((self._step - step, now - at))
                self._last[uid] = self._step, now

    def forget(self) -> None:
        """Begins a new period; waits go on from the last token."""
        self.waits, self.chunk_steps = [], []


def measure(num_streams: int, prompt_tokens: int, *, overlap: bool = False, **options: Any) -> Figures:
    """One way to run the engine on the demo model. Sequential steps by default, so that each step's time is its own."""
    environment = Environment(overlap=overlap, log_level="WARNING", flashinfer_tensor_cores=None)
    with LLM("demo", environment=environment, max_running_requests=num_streams + 1, **options) as llm:
        core, watch = llm.engine.core, _Watch(llm.engine.core, range(num_streams))
        for uid in range(num_streams):
            core.submit(_request(uid, STREAM_PROMPT, STREAM_ANSWER))
        for _ in range(WARM_UP_STEPS):
            watch.step()
        usual_ms = 1000 * float(np.median([seconds for steps, seconds in watch.waits if steps == 1]))
        watch.forget()
        arrival = time.perf_counter()
        core.submit(_request(num_streams, prompt_tokens, 1))
        while num_streams not in watch.heard:
            watch.step()
        first_token_ms = 1000 * (time.perf_counter() - arrival)
        watch.step()  # with prompts first, the streams' next token comes one step later
        return Figures(
            longest_wait_steps=max(steps for steps, _ in watch.waits),
            longest_wait_ms=1000 * max(seconds for _, seconds in watch.waits),
            usual_wait_ms=usual_ms,
            chunk_step_ms=1000 * float(np.median(watch.chunk_steps)),
            longest_chunk_step_ms=1000 * max(watch.chunk_steps),
            chunk_steps=len(watch.chunk_steps),
            first_token_ms=first_token_ms,
        )


def _request(uid: int, length: int, max_tokens: int) -> Request:
    """A random prompt whose answer has exactly `max_tokens`."""
    rng = Random(uid)
    token_ids = np.array([rng.randrange(5, 1000) for _ in range(length)], dtype="<i4").tobytes()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(uid=uid, token_ids=token_ids, params=params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(f"{arguments.streams} streams beside a prompt of {arguments.prompt_tokens:,} tokens")
    print(f"{'':30} {'longest wait':>22} {'usual wait':>11} {'chunk step':>11} {'chunks':>7} {'its first token':>16}")
    results = {}
    for name, options in LAYOUTS.items():
        one = results[name] = measure(arguments.streams, arguments.prompt_tokens, **options)
        print(
            f"{name:30} {one.longest_wait_steps:6} steps {one.longest_wait_ms:6.0f} ms {one.usual_wait_ms:8.1f} ms "
            f"{one.chunk_step_ms:8.1f} ms {one.chunk_steps:7} {one.first_token_ms:13.0f} ms"
        )
    if arguments.json:
        print(json.dumps({"interference": {name: asdict(one) for name, one in results.items()}}))


if __name__ == "__main__":
    main()
