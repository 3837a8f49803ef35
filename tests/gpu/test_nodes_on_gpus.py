"""Two nodes of one GPU each, on one machine: NCCL makes all sums, in captured graphs too; and a node that is lost.

    python -m pytest -q -p no:cacheprovider tests/gpu/test_nodes_on_gpus.py      a minute on two GPUs
    MINISGL_EAGER_GRAPHS=1 python -m pytest -q tests/gpu/test_nodes_on_gpus.py   on the CPU, to try it

Prints a table last: what a token takes on one node and on two.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.served import free_ports
from minisgl_backend import LLM
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.process.node_options import SECRET
from tests.integration.conftest import wait_for
from tests.integration.test_nodes import LOST_S, Node
from tests.integration.test_tensor_parallel import QUESTIONS

ENVIRONMENT = Environment.read()
ON_GPUS = torch.cuda.device_count() >= 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPUS and not ENVIRONMENT.eager_graphs, reason="needs two GPUs"),
]

PAIR: dict[str, Any] = {
    "tp": 2,
    "dtype": "float32",  # so that sums in another order choose no other token
    "attention_backend": "triton" if ON_GPUS else "torch",
    "cuda_graph_max_bs": 16 if ON_GPUS else 8,
    "cuda_graph_max_tokens": 512 if ON_GPUS else 64,
    "max_running_requests": 16 if ON_GPUS else 8,
    "max_prefill_length": 512 if ON_GPUS else 64,
    "num_pages": 400,
    "page_size": 16,
    "memory_ratio": 0.3,
}
TOKENS = 400 if ON_GPUS else 40
ROWS: list[tuple[str, str]] = []  # of the table


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    width = max((len(what) for what, _ in ROWS), default=0)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *(f"{what:{width}}  {found}" for what, found in ROWS), sep="\n")


def answers(llm: LLM) -> list[list[int]]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    greedy = llm.chat(conversations, temperature=0, max_tokens=60)
    random = llm.chat(conversations, temperature=1.0, seed=7, max_tokens=20)
    return [output.token_ids for output in (*greedy, *random)]


def note_times(llm: LLM, what: str) -> None:
    for streams in (1, 8):
        llm.generate([[5, 6]] * streams, temperature=0, max_tokens=8, ignore_eos=True)
        began = time.monotonic()
        llm.generate([[5, 6]] * streams, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        ROWS.append((f"{what}, {streams} streams", f"{1e3 * (time.monotonic() - began) / TOKENS:.2f} ms a step"))


def test_two_nodes_answer_as_one_and_a_lost_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", **PAIR) as llm:
        expected = answers(llm)
        note_times(llm, "one node, two GPUs")
    with LLM("demo", **PAIR, disable_pynccl=True) as llm:
        note_times(llm, "one node, NCCL alone")
    monkeypatch.setenv(SECRET, "the secret of two nodes on one machine")
    config = EngineConfig(**PAIR, nodes=2, rendezvous=f"127.0.0.1:{free_ports(1)[0]}")
    second = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"} if ON_GPUS else os.environ
    node = Node(config, tmp_path / "node.log", environment=second)
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "model"}
    try:
        with LLM("demo", **options) as llm:
            assert answers(llm) == expected
            note_times(llm, "two nodes")
            (rank,) = node.ranks
            began = time.monotonic()
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                llm.generate([[5, 6]], max_tokens=3000, ignore_eos=True)
            told = time.monotonic() - began
            ROWS.append(("a rank of the other node killed, told after", f"{told:.2f} s"))
            assert told < LOST_S
        with LLM("demo", **options) as llm:
            assert answers(llm) == expected
        wait_for(lambda: not node.ranks)
        assert node.end() == 0
    finally:
        node.process.kill()
        node.process.wait()
        ROWS.append(("the other node said", (tmp_path / "node.log").read_text(encoding="utf-8")[-2000:]))
