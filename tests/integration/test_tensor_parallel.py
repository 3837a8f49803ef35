"""Tensor parallelism on the CPU: followers mirror rank 0, and no rank dies alone."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine import followers as followers_module
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.llm import LLM
from minisgl_backend.step import StepDecisions, StepPlan
from tests.integration.conftest import Front, alive, wait_for

QUESTIONS = ["What is 17 + 25?", "Count from 1 to 40.", "What is 310 - 77?", "Repeat: 猫 🐱 déjà vu"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 128, "max_running_requests": 8, "max_prefill_length": 64}
QUICK_HANG_S = 8.0  # what a hang takes to be found in these tests
QUICK = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, hang_s=QUICK_HANG_S)


def answers(tp: int, **options: Any) -> list[list[int]]:
    with LLM("demo", tp=tp, **OPTIONS, **options) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        greedy = llm.chat(conversations, temperature=0, max_tokens=60)
        random = llm.chat(conversations, temperature=1.0, seed=7, max_tokens=20)
        return [output.token_ids for output in (*greedy, *random)]


def followers_of(pid: int) -> list[int]:
    """Child processes that are followers."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "minisgl_backend.engine.follower" in line]


@pytest.mark.slow
def test_the_same_answers_however_many_ranks(pytestconfig: pytest.Config) -> None:
    """Four of them with --full; tests/parity has a model over four in every run."""
    alone = answers(1)
    assert answers(2) == alone
    if pytestconfig.getoption("--full", default=False):
        assert answers(4) == alone


def test_the_death_of_a_follower_restarts_the_whole_engine(make_front: Callable[..., Front], socket_dir: Path) -> None:
    front = make_front(EngineConfig(tp=2, **OPTIONS))  # type: ignore[arg-type]
    core = front.client.core_pids[0]
    assert core is not None
    (follower,) = followers_of(core)
    front.submit([5, 6], max_tokens=3000, ignore_eos=True)
    wait_for(lambda: front.tokens)
    os.kill(follower, signal.SIGKILL)
    wait_for(lambda: front.downs)
    wait_for(lambda: front.client.welcomes[0] is not None)
    assert front.client.core_pids[0] != core
    uid = front.submit([5, 6], max_tokens=5, ignore_eos=True)
    wait_for(lambda: uid in front.reasons)
    assert len(front.tokens[uid]) == 5
    new_core = front.client.core_pids[0]
    assert new_core is not None
    (new_follower,) = followers_of(new_core)
    front.client.close()
    wait_for(lambda: not alive(new_core) and not alive(new_follower), 10)


def test_options_that_the_device_refuses_leave_no_rank() -> None:
    """By rank 0 alone, while the others are still starting."""
    with pytest.raises(ConfigError, match="attention_backend"):
        LLM("demo", tp=4, attention_backend="fi", **OPTIONS)
    assert followers_of(os.getpid()) == []


def test_a_start_that_fails_late_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ConfigError("there is no room")

    monkeypatch.setattr("minisgl_backend.engine.model_start._limits", refuse)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no room"):
        LLM("demo", tp=2, **OPTIONS)
    assert followers_of(os.getpid()) == []
    wait_for(lambda: set(threading.enumerate()) <= before, 10)


def test_an_engine_in_process_says_that_a_rank_died() -> None:
    before = set(threading.enumerate())
    with LLM("demo", tp=2, **OPTIONS) as llm:
        (follower,) = followers_of(os.getpid())
        os.kill(follower, signal.SIGKILL)
        wait_for(lambda: not alive(follower))
        with pytest.raises(EngineDeadError, match="rank"):
            llm.generate("hello", max_tokens=5)
        with pytest.raises(EngineDeadError):
            llm.generate("hello", max_tokens=5)
    wait_for(lambda: set(threading.enumerate()) <= before, 10)


def test_a_stopped_follower_counts_as_dead(
    make_front: Callable[..., Front], socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_HANG_SECONDS", str(QUICK_HANG_S))
    front = make_front(EngineConfig(tp=2, **OPTIONS))  # type: ignore[arg-type]
    core = front.client.core_pids[0]
    assert core is not None
    (follower,) = followers_of(core)
    front.submit([5, 6], max_tokens=3000, ignore_eos=True)
    wait_for(lambda: front.tokens)
    os.kill(follower, signal.SIGSTOP)
    wait_for(lambda: front.downs)
    wait_for(lambda: not alive(follower) and not alive(core))
    wait_for(lambda: front.client.welcomes[0] is not None)
    uid = front.submit([5, 6], max_tokens=5, ignore_eos=True)
    wait_for(lambda: uid in front.reasons)
    assert len(front.tokens[uid]) == 5


@pytest.mark.full
def test_a_stopped_follower_counts_as_dead_in_process_too() -> None:
    with LLM("demo", tp=2, environment=QUICK, **OPTIONS) as llm:  # type: ignore[arg-type]
        (follower,) = followers_of(os.getpid())
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 gave no sign of life for 8 s"):
            llm.generate([[5, 6]], max_tokens=50, ignore_eos=True)
        with pytest.raises(EngineDeadError):
            llm.generate([[5, 6]], max_tokens=5)
    assert not alive(follower)


def test_ranks_that_wait_in_different_collectives_count_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hears of it although it waits in a collective itself."""
    pack_step = followers_module.pack_step
    environment = dataclasses.replace(QUICK, eager_graphs=True)
    with LLM("demo", tp=2, environment=environment, **OPTIONS) as llm:  # type: ignore[arg-type]
        (follower,) = followers_of(os.getpid())
        llm.generate([[5, 6]], max_tokens=5)

        def pack_wrongly(plan: StepPlan, decisions: StepDecisions) -> bytes:
            return pack_step(plan, msgspec.structs.replace(decisions, resamples=True))

        monkeypatch.setattr(followers_module, "pack_step", pack_wrongly)
        with pytest.raises(EngineDeadError, match="does not come to an end on tensor-parallel rank"):
            llm.generate([[5, 6]], max_tokens=50, ignore_eos=True)
    wait_for(lambda: not alive(follower), 10)


def test_a_rank_that_compiles_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_step, slow_steps = followers_module.pack_step, [True]
    with LLM("demo", tp=2, environment=QUICK, **OPTIONS) as llm:  # type: ignore[arg-type]
        heartbeat = llm.engine.heartbeat
        expected = llm.generate([[5, 6]], temperature=0, max_tokens=5)[0].token_ids
        signs: set[bytes] = set()

        def pack_late(*step: Any) -> bytes:
            if slow_steps:
                slow_steps.clear()
                heartbeat.compiling()
                compiled_at = time.monotonic() + 2 * QUICK_HANG_S
                while time.monotonic() < compiled_at:
                    signs.add(heartbeat.sign)
                    time.sleep(0.1)
                heartbeat.compiled()
            return pack_step(*step)

        monkeypatch.setattr(followers_module, "pack_step", pack_late)
        assert llm.generate([[5, 6]], temperature=0, max_tokens=5)[0].token_ids == expected
        assert b"l" in signs
        assert b"s" not in signs


SCRIPT = """
import os, signal, subprocess, sys
from minisgl_backend import LLM
if __name__ == "__main__":
    llm = LLM("demo", tp=2, num_pages=128, max_running_requests=8)
    print(llm.generate([[5, 6]], max_tokens=3)[0].finish_reason, flush=True)
    if "kill" in sys.argv:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:  # ps itself
                pass
    llm.generate([[5, 6]], max_tokens=3)
    print("the end", flush=True)
"""


@pytest.mark.parametrize("ending", ["kill", "live"])
def test_a_script_that_does_not_close_its_engine_ends(tmp_path: Path, ending: str) -> None:
    """Also where an error of the engine's ends it, whose traceback keeps the engine alive to the last."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, str(path), ending], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert "length" in ended.stdout or "stop" in ended.stdout, ended.stderr
    if ending == "kill":
        assert ended.returncode == 1, ended.stderr
        assert "EngineDeadError" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
        assert "the end" in ended.stdout
