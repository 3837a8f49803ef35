"""Hours of trouble in minutes: clients of the real server that leave or lie, while its processes are killed.

Knows nothing of models: the null runner answers, so that every text can be checked.

    python -m benchmarks.soak --requests 20000 --cancels 0.2 --bad 0.1 --kills 20
    python -m benchmarks.soak --quick            three minutes at most
    python -m benchmarks.soak --minutes 5        as many requests as fit

The last line is one JSON object; the exit code is 1 if a stream was wrong, hung, or something was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.served import Served, Traces
from client import Client, ClientError, InvalidRequest, Unavailable
from minisgl_backend.errors import EngineDeadError

TIMEOUT_SECONDS = 60.0  # of a request; one that reaches it hung
PROMPTS = ("Hello", "Tell me a story", "Count to ten, please", "x")
LONGEST = 120  # tokens
BAD_OPTIONS: tuple[dict[str, object], ...] = (
    {"temperature": -1.0},
    {"top_p": 7.0},
    {"stop": ["x"] * 100},
    {"logit_bias": {99999999: 1.0}},
    {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"},
    {"sampling_parameters": {"no_such_field": 1}},
    {"n": 1000},
)


@dataclass(frozen=True)
class Plan:
    """What a soak does."""

    requests: int
    cancels: float  # share of requests that leave in the middle
    bad: float  # share of wrong requests
    kills: int
    minutes: float
    clients: int
    seed: int


@dataclass
class Outcome:
    """What came of it; all threads write, under the lock."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill to ready
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, fault: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            if fault:
                self.faults.append(fault)


class Soak:
    """One run against one server."""

    def __init__(self, plan: Plan, served: Served) -> None:
        self._plan = plan
        self._served = served
        self._draw = random.Random(plan.seed)
        self._open = plan.requests
        self._started = time.monotonic()
        self.outcome = Outcome()
        with Client(served.grpc, timeout=TIMEOUT_SECONDS) as client:
            self._answers = {p: client.generate(p, max_tokens=LONGEST, ignore_eos=True).text for p in PROMPTS}

    def run(self) -> None:
        """Until all requests are answered or the time is over."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self._plan.clients)]
        killer = threading.Thread(target=self._kill)
        for thread in (*threads, killer):
            thread.start()
        for thread in threads:
            thread.join()
        self._open = 0
        killer.join()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def _take(self) -> bool:
        with self.outcome.lock:
            self._open -= 1
            return self._open >= 0 and self.seconds() < 60 * self._plan.minutes

    def _ask(self, number: int) -> None:
        draw = random.Random(f"{self._plan.seed}/{number}")
        actions = {"whole": self._whole, "left": self._leaves, "bad": self._bad}
        http = number % 4 == 3
        address = f"http://{self._served.http}" if http else self._served.grpc
        with Client(address, timeout=TIMEOUT_SECONDS) as client:
            while self._take():
                lot = draw.random()
                leaves = lot < self._plan.bad + self._plan.cancels
                kind = "bad" if lot < self._plan.bad else "left" if leaves else "whole"
                start = time.monotonic()
                try:
                    actions[kind](client, draw)
                except Unavailable:
                    self.outcome.note(f"{kind}: unavailable")
                    with self.outcome.lock:
                        self._open += 1  # asked again
                    time.sleep(0.5)
                except ClientError as error:
                    self._judge(kind, error)
                if time.monotonic() - start > TIMEOUT_SECONDS:
                    self.outcome.note("hang", f"a request took {time.monotonic() - start:.0f} s")

    def _judge(self, kind: str, error: ClientError) -> None:
        """Errors that a kill explains are right; a timeout or a refusal of a right request is not."""
        explained = self._plan.kills and any(
            word in str(error)
            for word in ("not healthy", "ended before", "connection", "Connection", "closed", "reset")
        )
        self.outcome.note(f"{kind}: {type(error).__name__}", "" if explained else f"{kind}: {error!r}")

    def _whole(self, client: Client, draw: random.Random) -> None:
        prompt, count = draw.choice(PROMPTS), draw.randint(1, LONGEST)
        if draw.random() < 0.5:
            result = client.generate(prompt, max_tokens=count, ignore_eos=True)
        else:
            result = client.stream(prompt, max_tokens=count, ignore_eos=True).result()
        whole = self._answers[prompt]
        right = whole.startswith(result.text) and (count < LONGEST or result.text == whole) and result.text
        self.outcome.note("whole", "" if right else f"{prompt!r}, {count} tokens: {result.text!r}")

    def _leaves(self, client: Client, draw: random.Random) -> None:
        prompt, text = draw.choice(PROMPTS), ""
        with client.stream(prompt, max_tokens=LONGEST, ignore_eos=True) as stream:
            for _ in range(draw.randint(0, 10)):
                text += next(stream).text
        right = self._answers[prompt].startswith(text)
        self.outcome.note("left", "" if right else f"{prompt!r}, left: {text!r}")

    def _bad(self, client: Client, draw: random.Random) -> None:
        options = draw.choice(BAD_OPTIONS)
        try:
            client.stream(draw.choice(PROMPTS), max_tokens=5, **options).result()  # type: ignore[misc]
            self.outcome.note("bad", f"{options} was accepted")
        except InvalidRequest:
            self.outcome.note("bad")

    def _kill(self) -> None:
        """Engine cores, evenly over the run; now and then a stub."""
        for number in range(self._plan.kills):
            while self._open > 0 and self._progress() < (number + 0.5) / self._plan.kills:
                time.sleep(0.1)
            if self._open <= 0 or self.seconds() > 60 * self._plan.minutes:
                return
            victim = "tokenizer" if number % 5 == 3 else "core"
            start = time.monotonic()
            with contextlib.suppress(EngineDeadError, IndexError, ProcessLookupError):
                os.kill(self._served.core() if victim == "core" else self._served.stubs(victim)[0], signal.SIGKILL)
                self.outcome.note(f"killed {victim}")
            self._served.wait(lambda: not self._served.ready(), 10.0)
            self._served.wait(self._served.ready)
            self.outcome.recoveries.append(time.monotonic() - start)

    def _progress(self) -> float:
        done = 1 - self._open / self._plan.requests
        return max(done, self.seconds() / (60 * self._plan.minutes))


def report(soak: Soak, left: Sequence[str], log: str) -> dict[str, object]:
    """The last line."""
    outcome, seconds = soak.outcome, soak.seconds()
    total = sum(outcome.counts[kind] for kind in ("whole", "left", "bad"))
    return {
        "requests": total,
        "seconds": round(seconds, 1),
        "requests_per_s": round(total / seconds, 1),
        "counts": dict(sorted(outcome.counts.items())),
        "wrong": len(outcome.faults),
        "hangs": outcome.counts["hang"],
        "left_behind": list(left),
        "tracebacks": log.count("Traceback"),
        "recovery_s": {
            "median": round(sorted(outcome.recoveries)[len(outcome.recoveries) // 2], 1),
            "longest": round(max(outcome.recoveries), 1),
        }
        if outcome.recoveries
        else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    plan = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ("--runner", "null", "--null-runner-rate", "200", "--exit-timeout", "10")
        with Served(*options, log=log) as served:
            soak = Soak(plan, served)
            soak.run()
            try:
                served.wait(served.ready)
                served.wait(lambda: served.value("minisgl_kv_pages", state="leased") == 0, 30.0)
                pages = []
            except EngineDeadError as error:
                pages = [f"pages or readiness: {error}"]
            traces = Traces(served)
            stopped = served.stop()
        found = report(soak, [*pages, *traces.left()], log.read_text(errors="replace"))
        found["shutdown_s"] = round(stopped, 1)
    for fault in soak.outcome.faults[:20]:
        print("wrong:", fault, file=sys.stderr)
    print(json.dumps(found))
    return 1 if found["wrong"] or found["hangs"] or found["left_behind"] else 0


def parse(arguments: Sequence[str] | None) -> Plan:
    """The command line as a plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--cancels", type=float, default=0.2)
    parser.add_argument("--bad", type=float, default=0.1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most [%(default)s]")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a run for every change: at most 3 minutes, 4 kills")
    given = vars(parser.parse_args(arguments))
    if given.pop("quick"):
        given |= {"minutes": min(given["minutes"], 2.5), "kills": min(given["kills"], 4)}
    return Plan(**given)


if __name__ == "__main__":
    sys.exit(main())
