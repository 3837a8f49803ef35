"""One model over two nodes, which are two launchers on this machine, over gloo: the same answers as one node, and a
node that is lost is told to those who wait, and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.served import free_ports
from minisgl_backend.config import OPTIONS as OPTIONS_TABLE
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.llm import LLM
from minisgl_backend.process.node_options import SECRET
from tests.integration.conftest import Front, alive, wait_for
from tests.integration.test_tensor_parallel import OPTIONS, answers, followers_of

LOST_S = 2.0  # until those who wait hear that a node is lost


class Node:
    """`minisgl serve --node-rank 1`."""

    def __init__(
        self,
        config: EngineConfig,
        log: Path,
        *prefix: str,
        environment: Mapping[str, str] = os.environ,
        node_rank: int | None = 1,
    ) -> None:
        """`prefix`: of the command. `node_rank`: None where the environment says it."""
        self.health_port = free_ports(1)[0]
        given = ((option.name, getattr(config, option.name), option.default) for option in OPTIONS_TABLE.values())
        flags = {name: value for name, value, default in given if value != default}
        command = [*prefix, sys.executable, "-m", "minisgl_backend.host.server_supervisor"]
        command += [] if node_rank is None else ["--node-rank", str(node_rank)]
        command += ["--health-port", str(self.health_port)]
        command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    @property
    def ranks(self) -> list[int]:
        return followers_of(self.process.pid)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/health/ready", timeout=5):
                return True
        except urllib.error.HTTPError as answer:
            answer.close()
            return False

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(10)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "the secret of two nodes on one machine")


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(config: EngineConfig, *prefix: str) -> Node:
        nodes.append(Node(config, tmp_path / "node.log", *prefix))
        return nodes[-1]

    yield make
    for node in nodes:
        node.process.kill()
        node.process.wait()
    sys.stderr.write((tmp_path / "node.log").read_text(encoding="utf-8") if nodes else "")


def over_two(tp: int) -> EngineConfig:
    return EngineConfig(tp=tp, nodes=2, rendezvous=f"127.0.0.1:{free_ports(1)[0]}", **OPTIONS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return answers(1)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_same_answers_on_two_nodes(alone: list[list[int]], make_node: Callable[..., Node], tp: int) -> None:
    config = over_two(tp)
    node = make_node(config)
    assert answers(tp, nodes=2, rendezvous=config.rendezvous) == alone
    wait_for(lambda: "ended the group" in node.log.read_text(encoding="utf-8"))
    assert node.ranks == []
    assert node.end() == 0


def check_told(what: str, seconds: float) -> None:
    sys.stderr.write(f"{what}: those who wait know it after {seconds:.2f} s\n")
    assert seconds < LOST_S


def answers_again(front: Front) -> None:
    began = time.monotonic()
    wait_for(lambda: front.client.welcomes[0] is not None)
    uid = front.submit([5, 6], max_tokens=5, ignore_eos=True)
    wait_for(lambda: uid in front.reasons)
    assert len(front.tokens[uid]) == 5
    sys.stderr.write(f"the next answer came {time.monotonic() - began:.1f} s later\n")


def test_whatever_is_lost_comes_back(
    make_front: Callable[..., Front], make_node: Callable[..., Node], socket_dir: Path
) -> None:
    """A rank of the other node, its launcher, node 0's engine core."""
    config = over_two(2)
    node = make_node(config)
    front = make_front(config)
    wait_for(node.ready)

    def lose(what: str, kill: Callable[[], None]) -> None:
        uid = front.submit([5, 6], max_tokens=3000, ignore_eos=True)
        wait_for(lambda: uid in front.tokens)
        num_downs, lost_at = len(front.downs), time.monotonic()
        kill()
        wait_for(lambda: len(front.downs) > num_downs)
        check_told(what, front.downs[-1][0] - lost_at)
        assert uid in front.lost

    (rank,) = node.ranks
    lose("a rank of node 1 killed", lambda: os.kill(rank, signal.SIGKILL))
    answers_again(front)
    wait_for(node.ready)

    ranks = node.ranks
    lose("node 1 killed", node.process.kill)
    wait_for(lambda: not any(map(alive, ranks)))
    node = make_node(config)
    answers_again(front)
    wait_for(node.ready)

    core = front.client.core_pids[0]
    assert core is not None
    lose("node 0's engine core killed", lambda: os.kill(core, signal.SIGKILL))
    answers_again(front)
    (rank,) = node.ranks
    front.client.close()
    wait_for(lambda: not alive(rank))
    assert not node.ready()
    assert node.end() == 0


def test_a_node_with_other_options_is_refused(make_node: Callable[..., Node]) -> None:
    """Node 0 goes on waiting for the right one, and listens at the rendezvous alone."""
    config = over_two(2)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    script = f"from minisgl_backend import LLM; LLM('demo', tp=2, nodes=2, rendezvous='{config.rendezvous}')"
    leader = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        node = make_node(config)
        assert node.process.wait(60) == 2
        said = node.log.read_text(encoding="utf-8").splitlines()[-1]
        assert said == "[serve] error: dtype is 'float32'; allowed: 'auto', as on node 0"
        assert leader.poll() is None
    finally:
        leader.kill()
        leader.wait()


def test_several_nodes_in_process_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match=f"{SECRET} is unset"):
        LLM("demo", tp=2, nodes=2, rendezvous="127.0.0.1:29600", **OPTIONS)


def network(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[str]:
    """A network name space whose cable leads to this one: 10.213.77.1 here, 10.213.77.2 there."""
    name = f"minisgl{os.getpid()}"
    here = f"mg{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    try:
        network("netns", "add", name)
        network("link", "add", here, "type", "veth", "peer", "name", "there", "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network name space can be made here: {error.stderr.decode()}")
    try:
        network("addr", "add", "10.213.77.1/24", "dev", here)
        network("link", "set", here, "up")
        network("-n", name, "addr", "add", "10.213.77.2/24", "dev", "there")
        network("-n", name, "link", "set", "there", "up")
        network("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        network("netns", "del", name)  # and the cable with it


@pytest.mark.slow
def test_a_machine_that_is_gone_without_a_word(
    make_front: Callable[..., Front], make_node: Callable[..., Node], cable: str
) -> None:
    """Its cable is cut: no connection ends, nothing comes any more."""
    rendezvous = f"10.213.77.1:{free_ports(1)[0]}"
    config = EngineConfig(tp=2, nodes=2, rendezvous=rendezvous, **OPTIONS)  # type: ignore[arg-type]
    make_node(config, "ip", "netns", "exec", cable)
    front = make_front(config)

    def cut(what: str) -> None:
        num_downs, cut_at = len(front.downs), time.monotonic()
        network("-n", cable, "link", "set", "there", "down")
        wait_for(lambda: len(front.downs) > num_downs)
        check_told(f"the cable cut, {what}", front.downs[-1][0] - cut_at)
        network("-n", cable, "link", "set", "there", "up")
        answers_again(front)

    front.submit([5, 6], max_tokens=3000, ignore_eos=True)
    wait_for(lambda: front.tokens)
    cut("busy")
    cut("idle")
