"""One server over two nodes, which hear from their launcher which one they are: a node dies, who waits is told, and the
server comes back with the node; the demo model on the CPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import Served, free_ports
from client import Client, ClientError, Unavailable
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.process.node_options import SECRET
from tests.integration.test_nodes import LOST_S, Node

pytestmark = [pytest.mark.e2e, pytest.mark.full]  # tests/integration/test_nodes.py loses nodes in every run

QUESTION = "Count from 1 to 200."


class Group:
    """A server and its other node, which can die and be started again."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.config = EngineConfig(tp=2, nodes=2, num_pages=512, rendezvous=f"127.0.0.1:{port}")
        self._log = folder / "node.log"
        self._launcher = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1", SECRET: "secret of the group"}
        options = ("--tp", "2", "--nodes", "2", "--num-pages", "512", "--rendezvous", self.config.rendezvous or "")
        leader = {**self._launcher, "LWS_WORKER_INDEX": "0"}
        self.served = Served(*options, "--exit-timeout", "10", log=folder / "log", environment=leader)
        self.start_node()

    def start_node(self) -> None:
        environment = {**os.environ, **self._launcher, "LWS_WORKER_INDEX": "1"}
        self.node = Node(self.config, self._log, environment=environment, node_rank=None)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    made = Group(tmp_path_factory.mktemp("nodes"))
    try:
        with made.served:
            yield made
    finally:
        made.node.process.kill()
        made.node.process.wait()


def test_a_node_dies_and_comes_back(group: Group) -> None:
    served = group.served
    with Client(served.grpc, timeout=90.0) as client:
        right = client.generate(QUESTION, max_tokens=300, temperature=0).text
        assert right.startswith("1, 2, 3, 4, 5")
        told: list[tuple[float, ClientError]] = []

        def read() -> None:
            try:
                for _ in client.stream(QUESTION, max_tokens=900, temperature=0, ignore_eos=True):
                    started.set()
            except ClientError as error:
                told.append((time.monotonic(), error))

        started = threading.Event()
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(60)
        died_at = time.monotonic()
        group.node.process.kill()
        thread.join(60)
        ((told_at, error),) = told
        assert isinstance(error, Unavailable)
        assert told_at - died_at < LOST_S
        assert "engine" in served.readiness()["reason"]
        with pytest.raises(Unavailable):
            client.generate(QUESTION, max_tokens=5)
        group.start_node()
        served.wait(served.ready)
        served.wait(group.node.ready)
        assert client.generate(QUESTION, max_tokens=300, temperature=0).text == right
    assert "the server died" not in served.read_log()
    served.stop()
    assert group.node.process.poll() is None, "it waits for the next server"
    assert group.node.end() == 0
