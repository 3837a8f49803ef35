"""Hours of trouble in minutes: clients of the real server that leave or lie, while its processes are killed.

The demo model answers from two tensor-parallel ranks on CPU cores, and any of them is killed at any time. Requests with
every kind of option are mixed. Every answer is compared with what the same server said to the same request before the
trouble began.

    python -m benchmarks.soak --requests 20000 --cancels 0.2 --bad 0.1 --kills 20
    python -m benchmarks.soak --quick            about two minutes, run by .ci/run
    python -m benchmarks.soak --minutes 5        as many requests as fit
    python -m benchmarks.soak --dp 2 --tp 1      two engine cores: one's death leaves the other's streams alone
    python -m benchmarks.soak --runner null      no model: the server's front door at its fastest; one rank

The last line is one JSON object. The exit code is 1 if an answer was wrong, a request hung, the server did not come
back or something was left behind; times are only reported, since they are the machine's as much as the server's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.served import Served, Traces
from benchmarks.soak_kills import Killer, figures
from client import Client, ClientError, InvalidRequest, Result, Unavailable
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.host.triton_server import find_triton_server

Case = tuple[str, int, str]  # prompt, max_tokens, name in OPTIONS

TIMEOUT_SECONDS = 120.0  # of a request; one that reaches it hung
PROMPTS = ("What is 17 + 25?", "Count from 1 to 40.", "Count from 7 to 60.", "Repeat: 猫 🐱 déjà vu")
COUNTS = (1, 4, 16, 60, 120)  # max_tokens
# What else a request may ask for. Each of them beside all others, in one server, over and over.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 7},
    "siblings": {"temperature": 1.0, "min_p": 0.02, "seed": 11, "n": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "rules": {"temperature": 0.0, "logit_bias": {77: 4.0, 300: -100.0}, "bad_words": ["12", "4"], "min_tokens": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "prompt": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2, "n": 2},
    "stop": {"temperature": 0.0, "stop": ["5", "é"]},
    "guided": {"temperature": 0.0, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]{3,90}"},
}
OPTION_COUNTS = (4, 16)  # max_tokens of those that are not plain
PAGES = 256  # fewer than 32 of the longest answers need, so that some are preempted
BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"top_p": 7.0},
    {"stop": ["x"] * 100},
    {"logit_bias": {99999999: 1.0}},
    {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"},
    {"sampling_parameters": {"no_such_field": 1}},
    {"n": 1000},
)
# What a request may say that was inside a tokenizer process when that was killed.
STUB_WORDS = ("not healthy", "ended before", "connection", "Connection", "closed", "reset")


@dataclass(frozen=True)
class Plan:
    """What a soak does."""

    requests: int
    cancels: float  # share of requests that leave in the middle
    bad: float  # share of wrong requests
    kills: int  # of engine ranks
    stub_kills: int  # of tokenizer processes
    minutes: float
    clients: int
    seed: int
    tp: int
    dp: int
    runner: str
    log: Path | None

    def server_options(self) -> list[str]:
        """For scripts/serve.sh."""
        options = ["--exit-timeout", "10", "--num-pages", str(PAGES)]
        if self.runner == "null":
            return ["--exit-timeout", "10", "--runner", "null", "--null-runner-rate", "200", "--dp", str(self.dp)]
        return [*options, "--tp", str(self.tp), "--dp", str(self.dp)]


@dataclass
class Outcome:
    """What came of it; all threads write, under the lock."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
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
        self._open = plan.requests
        self.outcome = Outcome()
        self._answers = self._right_answers()
        self._cases = sorted(self._answers)
        ranks = 1 if plan.runner == "null" else plan.tp
        draw = random.Random(plan.seed)
        self.killer = Killer(
            served, cores=plan.dp, ranks=ranks, kills=plan.kills, stub_kills=plan.stub_kills, draw=draw
        )
        self._started = time.monotonic()

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

    def _right_answers(self) -> dict[Case, Result]:
        """By what is asked; the null runner knows no options."""
        names = ["plain"] if self._plan.runner == "null" else list(OPTIONS)
        cases = [
            (prompt, count, name)
            for name in names
            for prompt in PROMPTS
            for count in (COUNTS if name == "plain" else OPTION_COUNTS)
        ]
        with Client(self._served.grpc, timeout=TIMEOUT_SECONDS) as client, ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda case: client.generate(case[0], max_tokens=case[1], **OPTIONS[case[2]]), cases)
            return dict(zip(cases, results, strict=True))

    def _is_over(self) -> bool:
        return self._open <= 0 or self.seconds() > 60 * self._plan.minutes

    def _take(self) -> bool:
        with self.outcome.lock:
            if self._is_over():
                return False
            self._open -= 1
            return True

    def _ask(self, number: int) -> None:
        draw = random.Random(f"{self._plan.seed}/{number}")
        actions = {"whole": self._whole, "left": self._leaves, "bad": self._bad}
        address = f"http://{self._served.http}" if number % 4 == 3 else self._served.grpc
        with Client(address, timeout=TIMEOUT_SECONDS) as client:
            while self._take():
                lot = draw.random()
                leaves = lot < self._plan.bad + self._plan.cancels
                kind = "bad" if lot < self._plan.bad else "left" if leaves else "whole"
                start = time.monotonic()
                try:
                    actions[kind](client, draw)
                except Unavailable:
                    self.killer.note_told(start)
                    self.outcome.note(f"{kind}: unavailable")
                    with self.outcome.lock:
                        self._open += 1  # asked again
                    time.sleep(0.5)
                except ClientError as error:
                    self._judge(kind, error)
                except Exception as error:  # of the client itself; the other clients go on
                    self.outcome.note("failed", f"{kind}: {error!r}")
                if time.monotonic() - start > TIMEOUT_SECONDS:
                    self.outcome.note("hang", f"a request took {time.monotonic() - start:.0f} s")

    def _judge(self, kind: str, error: ClientError) -> None:
        """A killed rank explains UNAVAILABLE and nothing else; a killed tokenizer process a few more errors."""
        explained = any(kill.victim == "tokenizer" for kill in self.killer.kills) and any(
            word in str(error) for word in STUB_WORDS
        )
        self.outcome.note(f"{kind}: {type(error).__name__}", "" if explained else f"{kind}: {error!r}")

    def _whole(self, client: Client, draw: random.Random) -> None:
        # Half of the requests are plain: the others are slower, and more of them would be fewer requests.
        plain = draw.random() < 0.5
        case = (draw.choice(PROMPTS), draw.choice(COUNTS), "plain") if plain else draw.choice(self._cases)
        prompt, count, name = case
        if draw.random() < 0.5:
            result = client.generate(prompt, max_tokens=count, **OPTIONS[name])
        else:
            result = client.stream(prompt, max_tokens=count, **OPTIONS[name]).result()
        told, right = _facts(result), _facts(self._answers[case])
        self.outcome.note("whole", "" if told == right else f"{case}: {told}, not {right}")

    def _leaves(self, client: Client, draw: random.Random) -> None:
        prompt, text = draw.choice(PROMPTS), ""
        with client.stream(prompt, max_tokens=COUNTS[-1], temperature=0) as stream:
            for _ in range(draw.randint(0, 10)):
                chunk = next(stream, None)
                text += chunk.text if chunk is not None else ""
        right = self._answers[prompt, COUNTS[-1], "plain"].choices[0].text.startswith(text)
        self.outcome.note("left", "" if right else f"{prompt!r}, left: {text!r}")

    def _bad(self, client: Client, draw: random.Random) -> None:
        options = draw.choice(BAD_OPTIONS)
        try:
            client.stream(draw.choice(PROMPTS), max_tokens=5, **options).result()
            self.outcome.note("bad", f"{options} was accepted")
        except InvalidRequest:
            self.outcome.note("bad")

    def _kill(self) -> None:
        try:
            self.killer.run(self._progress, self._is_over)
        except Exception as error:
            self.outcome.note("failed", f"after a kill: {error!r}")

    def _progress(self) -> float:
        done = 1 - self._open / self._plan.requests
        return max(done, self.seconds() / (60 * self._plan.minutes))


def _facts(result: Result) -> list[object]:
    """What must be the same each time: the values of log-probabilities differ in their last digits."""
    choices = [
        (choice.text, choice.finish_reason, choice.num_output_tokens, len(choice.logprobs or ()))
        for choice in result.choices
    ]
    return [choices, len(result.prompt_logprobs or ())]


def unexplained_deaths(plan: Plan, log: str) -> int:
    """How often tritonserver itself died; 2.51 sometimes does while a model with a killed process is reloaded."""
    return 0 if plan.stub_kills else log.count("the server died")


def report(soak: Soak, seconds: float, left: Sequence[str], log: str) -> dict[str, object]:
    """The last line."""
    outcome, kills = soak.outcome, soak.killer.kills
    total = sum(outcome.counts[kind] for kind in ("whole", "left", "bad"))
    return {
        "requests": total,
        "seconds": round(seconds, 1),
        "requests_per_s": round(total / seconds, 1),
        "counts": dict(sorted(outcome.counts.items())),
        "killed": dict(sorted(Counter(kill.victim for kill in kills).items())),
        "ranks": figures([kill for kill in kills if kill.victim != "tokenizer"]),
        "tokenizer": figures([kill for kill in kills if kill.victim == "tokenizer"]),
        "wrong": len(outcome.faults),
        "hangs": outcome.counts["hang"],
        "left_behind": list(left),
        "server_deaths": log.count("the server died"),
        "tracebacks": log.count("Traceback"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    plan = parse(arguments)
    try:
        find_triton_server()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        log = plan.log or Path(folder) / "log"
        with Served(*plan.server_options(), log=log) as served:
            soak = Soak(plan, served)
            soak.run()
            seconds = soak.seconds()
            left = unfinished(served)
            traces = Traces(served)
            stopped = served.stop()
        text = log.read_text(errors="replace")
        found, deaths = report(soak, seconds, [*left, *traces.left()], text), unexplained_deaths(plan, text)
        found["shutdown_s"] = round(stopped, 1)
    for fault in soak.outcome.faults[:20]:
        print("wrong:", fault, file=sys.stderr)
    print(json.dumps(found))
    return 1 if found["wrong"] or found["hangs"] or found["left_behind"] or deaths else 0


def unfinished(served: Served) -> list[str]:
    """What the server still does although nobody asks for anything."""
    try:
        served.wait(served.ready)
        served.wait(lambda: served.value("minisgl_kv_pages", state="total") > 0)
        served.wait(lambda: served.value("minisgl_kv_pages", state="leased") == 0)
    except EngineDeadError as error:
        return [f"pages or readiness: {error}"]
    return []


def parse(arguments: Sequence[str] | None) -> Plan:
    """The command line as a plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--cancels", type=float, default=0.2, help="share of requests that leave [%(default)s]")
    parser.add_argument("--bad", type=float, default=0.1, help="share of wrong requests [%(default)s]")
    parser.add_argument("--kills", type=int, default=20, help="of engine ranks [%(default)s]")
    parser.add_argument("--stub-kills", type=int, default=0, help="of tokenizer processes, too [%(default)s]")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most [%(default)s]")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=2, help="ranks of the engine [%(default)s]")
    parser.add_argument("--dp", type=int, default=1, help="engine cores of so many ranks each [%(default)s]")
    parser.add_argument("--runner", choices=("model", "null"), default="model", help="null: no model [%(default)s]")
    parser.add_argument("--log", type=Path, help="where to keep what the server says")
    parser.add_argument("--quick", action="store_true", help="about 2 minutes, 16 clients, 4 kills")
    given = vars(parser.parse_args(arguments))
    if given.pop("quick"):
        given |= {"minutes": min(given["minutes"], 2.0), "kills": min(given["kills"], 4)}
        given |= {"clients": min(given["clients"], 16)}
    return Plan(**given)


if __name__ == "__main__":
    sys.exit(main())
