"""Tensor parallelism on the CPU: followers mirror rank 0, and no rank dies alone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.llm import LLM
from tests.integration.conftest import Front, alive, wait_for

QUESTIONS = ["What is 17 + 25?", "Count from 1 to 40.", "What is 310 - 77?", "Repeat: 猫 🐱 déjà vu"]
OPTIONS = {"num_pages": 128, "max_running_requests": 8, "max_prefill_length": 64}


def answers(tp: int) -> list[list[int]]:
    with LLM("demo", tp=tp, **OPTIONS) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        greedy = llm.chat(conversations, temperature=0, max_tokens=60)
        random = llm.chat(conversations, temperature=1.0, seed=7, max_tokens=20)
        return [output.token_ids for output in (*greedy, *random)]


def followers_of(pid: int) -> list[int]:
    """Child processes that are followers."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "minisgl_backend.engine.follower" in line]


@pytest.mark.slow
def test_the_same_answers_however_many_ranks() -> None:
    alone = answers(1)
    assert answers(2) == alone
    assert answers(4) == alone


def test_the_death_of_a_follower_restarts_the_whole_engine(make_front: Callable[..., Front], socket_dir: Path) -> None:
    front = make_front(EngineConfig(tp=2, **OPTIONS))  # type: ignore[arg-type]
    core = front.client.core_pid
    assert core is not None
    (follower,) = followers_of(core)
    front.submit([5, 6], max_tokens=3000, ignore_eos=True)
    wait_for(lambda: front.tokens)
    os.kill(follower, signal.SIGKILL)
    wait_for(lambda: front.downs)
    wait_for(lambda: front.client.welcome is not None)
    assert front.client.core_pid != core
    uid = front.submit([5, 6], max_tokens=5, ignore_eos=True)
    wait_for(lambda: uid in front.reasons)
    assert len(front.tokens[uid]) == 5
    new_core = front.client.core_pid
    assert new_core is not None
    (new_follower,) = followers_of(new_core)
    front.client.close()
    wait_for(lambda: not alive(new_core) and not alive(new_follower), 10)


def test_options_that_the_device_refuses_leave_no_rank() -> None:
    """By rank 0 alone, while the others are still starting."""
    with pytest.raises(ConfigError, match="attention_backend"):
        LLM("demo", tp=4, attention_backend="fi", **OPTIONS)
    assert followers_of(os.getpid()) == []


def test_an_engine_in_process_says_that_a_rank_died() -> None:
    with LLM("demo", tp=2, **OPTIONS) as llm:
        (follower,) = followers_of(os.getpid())
        os.kill(follower, signal.SIGKILL)
        wait_for(lambda: not alive(follower))
        with pytest.raises(EngineDeadError, match="rank"):
            llm.generate("hello", max_tokens=5)
        with pytest.raises(EngineDeadError):
            llm.generate("hello", max_tokens=5)
