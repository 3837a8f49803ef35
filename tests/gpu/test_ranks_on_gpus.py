"""Two ranks on two GPUs: real graphs, pieces and collectives, with every option of a request, and ranks that are lost.

    python -m pytest -q -p no:cacheprovider tests/gpu/test_ranks_on_gpus.py      about four minutes on two GPUs
    MINISGL_EAGER_GRAPHS=1 python -m pytest -q tests/gpu/test_ranks_on_gpus.py   less of it on the CPU, to try it

Prints a table last. What hangs is found by the engine itself and told as an EngineDeadError, with the place where each
thread of each rank stood; what even that does not find ends the run after WATCHDOG_S, with the same.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.demo_tasks import MAX_TOKENS
from benchmarks.gauge import ask
from minisgl_backend import LLM, SamplingParams
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.request import FinishReason, Grammar
from tests.integration.conftest import START_SECONDS, Front, wait_for
from tests.random_requests import RandomAnswer, RandomRequest, ask_core, assert_same, random_requests

ENVIRONMENT = Environment.read()
ON_GPUS = torch.cuda.device_count() >= 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPUS and not ENVIRONMENT.eager_graphs, reason="needs two GPUs"),
]

WATCHDOG_S = 90.0 if ON_GPUS else 600.0  # for one test, its engine's start included
REQUESTS = 200 if ON_GPUS else 20
QUESTIONS = 8 if ON_GPUS else 1  # of each kind
MOST_SECONDS_TOLD = 2.0
QUICK_HANG_S = 6.0
# Texts that may differ between one and two ranks: sums in another order, where two tokens are as likely as each other.
MOST_DIFFERENT = 0.05
LEAST_RIGHT = 0.98
TOLERANCE = 2e-2  # nats; products of float32 may be computed in TF32

PAIR: dict[str, Any] = {
    "tp": 2,
    "attention_backend": "triton" if ON_GPUS else "torch",
    "cuda_graph_max_bs": 64 if ON_GPUS else 8,
    "cuda_graph_max_tokens": 512 if ON_GPUS else 64,
    "max_running_requests": 64 if ON_GPUS else 8,
    "max_prefill_length": 1024 if ON_GPUS else 64,
    "mixed_prefill_length": 128 if ON_GPUS else 64,
    "memory_ratio": 0.3,
}
FEW_PAGES = {"page_size": 16, "num_pages": 400 if ON_GPUS else 60}
PROMPT = [5, 6, 7, 8, 9]
ROWS: list[tuple[str, str]] = []  # of the table


def note(what: str, found: str) -> None:
    ROWS.append((what, found))


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    width = max((len(what) for what, _ in ROWS), default=0)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{'tensor parallel, two ranks':{width}}  found", *(f"{a:{width}}  {b}" for a, b in ROWS), sep="\n")


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def ask_all(llm: LLM, requests: Sequence[RandomRequest]) -> tuple[list[list[RandomAnswer]], float]:
    started = time.monotonic()
    with llm.engine.heartbeat.step():
        answers = ask_core(llm.engine.core, requests, lambda turn: llm.engine.heartbeat.progress())
    return answers, time.monotonic() - started


def requests_of(seed: int) -> list[RandomRequest]:
    return random_requests(seed, REQUESTS, longest_prompt=300)


# ---- float32: the answers of one rank


@pytest.fixture(scope="module")
def expected() -> list[list[RandomAnswer]]:
    options = {**PAIR, **FEW_PAGES, "tp": 1, "dtype": "float32"}
    with LLM("demo", **options) as llm:
        answers, seconds = ask_all(llm, requests_of(1))
        note(f"{REQUESTS} random requests, float32, one rank", f"{seconds:.1f} s")
        return answers


def test_random_requests_are_answered_as_on_one_rank(expected: list[list[RandomAnswer]]) -> None:
    requests = requests_of(1)
    with LLM("demo", dtype="float32", **PAIR, **FEW_PAGES) as llm:
        answers, seconds = ask_all(llm, requests)
        preempted, leased = llm.stats.total_preempted, llm.stats.pages_leased
    different = []
    for one, ours, theirs in zip(requests, expected, answers, strict=True):
        try:
            assert_same([one], [ours], [theirs], TOLERANCE)
        except AssertionError as error:
            different.append(str(error))
    same = f"{REQUESTS - len(different)} of {REQUESTS} the same"
    note(f"{REQUESTS} random requests, float32", f"{same}, {preempted} preemptions, {seconds:.1f} s")
    print(*different, sep="\n")
    assert len(different) <= MOST_DIFFERENT * REQUESTS
    assert not any(answer.reason is FinishReason.ERROR for group in answers for answer in group)
    assert leased == 0


@pytest.mark.skipif(not ON_GPUS, reason="needs the GPUs' copy engines")
@pytest.mark.parametrize("captured", [0, 8192])
def test_passes_in_two_lanes_are_answered_as_on_one_rank(captured: int) -> None:
    """Thousands of prompt tokens a step: kernel by kernel parts of sums are sent ahead, in graphs NCCL sums."""
    rng = random.Random(5)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(100, 140))] for _ in range(160)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    options = {**PAIR, "max_prefill_length": 8192, "cuda_graph_max_tokens": captured, "dtype": "float32"}
    answers = []
    for tp in (1, 2):
        with LLM("demo", **{**options, "tp": tp}) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params)])
    same = sum(one == other for one, other in zip(*answers, strict=True))
    what = f"{len(prompts)} prompts in steps of 8,192 tokens, {captured} in graphs, float32"
    note(what, f"{same} of {len(prompts)} the same")
    assert same >= (1 - MOST_DIFFERENT) * len(prompts)


# ---- bfloat16: right answers, and every option


@pytest.fixture(scope="class")
def pair() -> Iterator[LLM]:
    with LLM("demo", dtype="bfloat16", **PAIR) as llm:
        yield llm


def answer_questions(llm: LLM) -> str:
    asked = ask(QUESTIONS)
    started = time.monotonic()
    outputs = llm.chat([one.messages for one in asked], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    right = sum(one.is_right(output.text) for one, output in zip(asked, outputs, strict=True))
    assert all(output.finish_reason != "error" for output in outputs)
    assert right >= LEAST_RIGHT * len(asked)
    return f"{right} of {len(asked)} right, {time.monotonic() - started:.1f} s"


OPTIONS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "grammar, greedy": {"grammar": Grammar(kind="regex", text="[a-c]{3,9}")},
    "grammar, seeded": {"grammar": Grammar(kind="regex", text="[a-c]{3,9}"), "temperature": 1.0, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias, bad words": {"logit_bias": {77: 5.0}, "bad_words_token_ids": ((20, 21), (30,))},
    "top-k, top-p, min-p": {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "n": 3},
}


class TestBfloat16:
    """One engine for all of these: its graphs take a while."""

    def test_gauge(self, pair: LLM) -> None:
        note(f"gauge, bfloat16, {PAIR['attention_backend']}", answer_questions(pair))

    @pytest.mark.parametrize("name", OPTIONS)
    def test_option(self, pair: LLM, name: str) -> None:
        if "grammar" in name:
            pytest.importorskip("xgrammar")
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **OPTIONS[name]})
        plain = SamplingParams(temperature=0.0, max_tokens=24)
        first, again = (pair.generate([PROMPT, PROMPT[::-1]], [params, plain]) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            assert one.finish_reason == other.finish_reason != "error"
        if params.grammar is not None:
            assert set(first[0].text) <= set("abc")
            assert 3 <= len(first[0].text) <= 9
        if params.logprobs is not None:
            assert first[0].logprobs is not None
            assert len(first[0].logprobs) == len(first[0].token_ids)
            assert first[0].prompt_logprobs is not None
            assert len(first[0].prompt_logprobs) == len(PROMPT) - 1
        note(name, "answered")

    def test_random_requests_end_without_error(self, pair: LLM) -> None:
        requests = requests_of(2)
        answers, seconds = ask_all(pair, requests)
        failed = [answer for group in answers for answer in group if answer.reason is FinishReason.ERROR]
        note(f"{REQUESTS} random requests, bfloat16", f"{len(failed)} errors, {seconds:.1f} s")
        assert failed == []
        assert all(answer.reason for group in answers for answer in group)


# ---- lost ranks


def followers_of(pid: int) -> list[int]:
    """Child processes that are followers; by /proc, since a small container has no `ps`."""
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [child for child in children if b"minisgl_backend.engine.follower" in command_of(child)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_who_waits_is_told_of_a_killed_rank() -> None:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-test-", dir="/tmp"))
    front = Front(EngineConfig(model="demo", dtype="bfloat16", **PAIR), directory)
    try:
        front.client.start(timeout_s=START_SECONDS)
        (core,) = front.client.core_pids
        assert core is not None
        front.submit(PROMPT, max_tokens=3000, ignore_eos=True)
        wait_for(lambda: front.tokens)
        (follower,) = followers_of(core)
        killed = time.monotonic()
        os.kill(follower, signal.SIGKILL)
        wait_for(lambda: front.downs)
        told = front.downs[0][0] - killed
    finally:
        front.client.close()
        shutil.rmtree(directory, ignore_errors=True)
    note("a killed rank", f"told after {told:.2f} s")
    assert told < MOST_SECONDS_TOLD


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([PROMPT], max_tokens=500, ignore_eos=True)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_in_process_gives_up(ending: signal.Signals) -> None:
    """Rank 0 waits on its device for what the other rank does not do, and goes on."""
    environment = dataclasses.replace(ENVIRONMENT, hang_s=QUICK_HANG_S)
    ended: list[float] = []
    with LLM("demo", dtype="bfloat16", environment=environment, **PAIR) as llm:
        (follower,) = followers_of(os.getpid())

        def end() -> None:
            ended.append(time.monotonic())
            os.kill(follower, ending)

        timer = threading.Timer(1.0, end)
        timer.start()
        with pytest.raises(EngineDeadError):
            generate_for_ever(llm)
        told = time.monotonic() - ended[0]
    closed = time.monotonic() - ended[0] - told
    note(f"a {ending.name} rank, in process", f"told after {told:.2f} s, closed after {closed:.2f} s more")
    assert told < QUICK_HANG_S + 6.0


# ---- other attention kernels: last, since one that compiles its own may take longer than the watchdog allows


@pytest.mark.parametrize("attention", ["fa", "fi"])
def test_gauge_on(attention: str) -> None:
    try:
        llm = LLM("demo", dtype="bfloat16", **{**PAIR, "attention_backend": attention})
    except ConfigError as error:
        note(f"gauge, bfloat16, {attention}", "not on this machine")
        pytest.skip(str(error))
    with llm:
        note(f"gauge, bfloat16, {attention}", answer_questions(llm))
