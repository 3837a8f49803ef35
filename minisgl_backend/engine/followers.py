"""Rank 0's side of tensor parallelism: starts the follower processes, sends them each step plan, watches them.

Imports torch only after the followers have been started, so that all import it at the same time.

Plans travel over one connection per follower: a socket pair on this machine, or the connection that another node's
follower has opened (`Nodes`). Tensors go through collectives (NCCL or gloo). A rank that fails cannot be replaced in
the middle of a step, since the others wait in a collective: the whole engine starts again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl_backend.arrays import Int32Array
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.nodes import PING_S, Nodes
from minisgl_backend.engine.stages import PendingStep
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.plan_codec import AdapterTask, pack_step, pack_task
from minisgl_backend.process.liveness import PERIOD_S, Heartbeat, Liveness, Sign, wait_in_vain
from minisgl_backend.process.node_options import read_secret
from minisgl_backend.process.spawn import describe_end, start_child
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.step import StepDecisions, StepPlan

if TYPE_CHECKING:
    import torch

    from minisgl_backend.runner.adapter_host import AdapterHost
    from minisgl_backend.runner.model_runner import ModelRunner
    from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LENGTH = struct.Struct("<I")  # before each plan on a link: its length in bytes
STOP_GRACE_S = 2.0
START_GRACE_S = 5.0


class Followers:
    """The followers of one engine, as rank 0 sees them."""

    def __init__(self, config: EngineConfig, environment: Environment, model_dir: Path) -> None:
        """Raises ConfigError where other nodes are expected and this one cannot listen for them."""
        self._size = size = config.tp
        self._hang_s = environment.hang_s
        # Open from the start: a follower may come first, and then waits in the queue.
        self._listener = socket.create_server((HOST, 0), backlog=size)
        self._processes: list[subprocess.Popen[bytes]] = []  # those of this node
        self._links: list[socket.socket] = []  # to ranks 1, 2, ...
        self._port = self._listener.getsockname()[1]
        self._nodes: Nodes | None = None  # None: all ranks are on this node
        if config.nodes > 1:
            self._nodes = Nodes(config, environment, model_dir, self._port, read_secret(os.environ))
        self._tp: TensorParallel | None = None
        self._on_gpu = False
        self._watcher: threading.Thread | None = None
        self._ready = threading.Event()
        self._closed = threading.Event()

    @classmethod
    def start(cls, config: EngineConfig, environment: Environment, model_dir: Path, dp_rank: int = 0) -> Followers:
        """Starts ranks 1 to tp - 1 of engine core `dp_rank`, with rank 0's settings; with several nodes, after all of
        them have joined."""
        followers = cls(config, environment, model_dir)
        settings = ["--config", _json(config), "--environment", _json(environment), "--dp-rank", str(dp_rank)]
        try:
            if followers._nodes is not None:
                followers._nodes.gather()
                settings += ["--address", followers._nodes.address]
            for rank in range(1, config.ranks_per_node):
                followers._start_rank(rank, settings)
            if followers._nodes is not None:
                followers._links += followers._nodes.links()
        except BaseException:
            followers.close()
            raise
        return followers

    def _start_rank(self, rank: int, settings: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self._links.append(ours)
        arguments = ["--rank", str(rank), "--port", str(self._port), "--link-fd", str(theirs.fileno())]
        arguments += settings
        tied = threading.current_thread() is threading.main_thread()
        with theirs:
            self._processes.append(
                start_child("minisgl_backend.engine.follower", arguments, fds=(theirs.fileno(),), tied=tied)
            )

    def connect(self, runtime: RuntimeConfig, device: torch.device, heartbeat: Heartbeat) -> TensorParallel:
        """Rank 0's collectives, once all followers have connected. `device`: rank 0's.

        `heartbeat` is told while a collective waits for other ranks.

        Raises ConfigError if a follower of this node ended instead, EngineDeadError if one of another node is lost, and
        both as `TensorParallel.connect` does.
        """
        outcome: queue.SimpleQueue[TensorParallel | Exception] = queue.SimpleQueue()
        # Nothing can interrupt the rendezvous, so it runs on a thread of its own, which is abandoned if it fails.
        threading.Thread(target=self._rendezvous, args=(runtime, device, outcome), daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                tp = outcome.get(timeout=0.1)
                if isinstance(tp, Exception):
                    raise tp
                tp.note_waits(heartbeat.waiting)
                self._tp, self._on_gpu = tp, device.type == "cuda"
                return tp
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    end = describe_end(process.returncode)
                    raise ConfigError(f"rank {rank} of {self._size} ended while it started ({end}); its log says why")
            if self._nodes is not None and (lost := self._nodes.look()) is not None:
                raise EngineDeadError(lost)

    def _rendezvous(
        self, runtime: RuntimeConfig, device: torch.device, outcome: queue.SimpleQueue[TensorParallel | Exception]
    ) -> None:
        from minisgl_backend.tensor_parallel import TensorParallel

        try:
            outcome.put(
                TensorParallel.connect(
                    0,
                    self._size,
                    HOST,
                    self._port,
                    device,
                    listener=self._listener,
                    address=self._nodes.address if self._nodes is not None else "",
                    shared=runtime.shared(),
                )
            )
        except Exception as error:
            outcome.put(error)

    def watch(self, on_loss: Callable[[str], None], heartbeat: Heartbeat) -> None:
        """Calls `on_loss` with a reason, on a thread of its own, when a follower ends before `close`, or when ranks
        hang. If this process continues after that, all waits for the follower end with an error or with unusable
        results.


        `heartbeat`: rank 0's.
        """
        heartbeat.start()
        self._watcher = threading.Thread(
            target=self._watch, args=(on_loss, heartbeat), name="follower-watch", daemon=True
        )
        self._watcher.start()

    def note_ready(self) -> None:
        """All ranks are built."""
        self._ready.set()
        if self._nodes is not None:
            self._nodes.note_ready()

    def _watch(self, on_loss: Callable[[str], None], heartbeat: Heartbeat) -> None:
        ranks = [Liveness(self._hang_s) for _ in self._links]
        try:
            while (reason := self._look(ranks, heartbeat)) is None and not self._closed.is_set():
                pass
        except Exception as error:  # unwatched ranks may wait for each other for ever
            log.exception("the ranks cannot be watched")
            reason = f"the tensor-parallel ranks cannot be watched: {error}"
        if not self._ready.is_set():
            # What stops a follower from starting mostly stops rank 0, too, with a clearer message.
            self._closed.wait(START_GRACE_S)
        if reason is None or self._closed.is_set():
            return
        on_loss(reason)
        for process in self._processes:
            process.kill()
        if self._nodes is not None:
            self._nodes.close()
        if self._tp is not None and self._on_gpu:
            self._tp.abandon()

    def _look(self, ranks: list[Liveness], heartbeat: Heartbeat) -> str | None:
        """Listens to the followers for a second; returns the reason if the engine cannot go on."""
        nodes, period_s = ([], PERIOD_S) if self._nodes is None else (self._nodes.connections, PING_S)
        readable = select.select([*self._links, *nodes], [], [], period_s)[0]
        if self._nodes is not None and (lost := self._nodes.look()) is not None:
            return lost
        for rank, link in enumerate(self._links, start=1):
            if link not in readable:
                continue
            try:
                signs = link.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                signs = b""
            if not signs:
                return f"tensor-parallel rank {rank} of {self._size} ended"
            ranks[rank - 1].heard(signs)
        now = time.monotonic()
        for rank, liveness in enumerate(ranks, start=1):
            if liveness.is_silent(now):
                return f"tensor-parallel rank {rank} of {self._size} gave no sign of life for {self._hang_s:g} s"
        signs_of_all = [heartbeat.sign, *(liveness.sign for liveness in ranks)]
        if wait_in_vain(signs_of_all):
            stuck = [str(rank) for rank, sign in enumerate(signs_of_all) if sign is Sign.STUCK]
            return f"a step does not come to an end on tensor-parallel rank {' and '.join(stuck)} of {self._size}"
        return None

    def send(self, plan: StepPlan, decisions: StepDecisions) -> None:
        """Sends the step to every follower. Raises EngineDeadError if one is gone."""
        self._send(pack_step(plan, decisions))

    def tell(self, task: AdapterTask) -> None:
        """Sends every follower what to do before the next step. Raises EngineDeadError if one is gone."""
        self._send(pack_task(task))

    def _send(self, packed: bytes) -> None:
        frame = LENGTH.pack(len(packed)) + packed
        try:
            for link in self._links:
                link.sendall(frame)
        except OSError as error:
            raise EngineDeadError(f"a tensor-parallel rank ended: {error}") from error

    def close(self) -> None:
        """Ends the followers."""
        self._closed.set()
        self._listener.close()
        if self._tp is None:  # still starting: there is nothing to shut down in order
            for process in self._processes:
                process.kill()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()  # it uses the links, and ends with them
        if self._nodes is not None:
            self._nodes.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for link in self._links:
            link.close()
        if self._tp is not None:
            self._tp.close()
        self._processes, self._links, self._tp = [], [], None


class LeaderRunner:
    """Rank 0's runner: sends each step to the followers after its host has done everything in which a request can fail.

    So a request that cannot be served fails alone, as on one device, and the ranks stay in step.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    def close(self) -> None:
        """Ends the followers and leaves the group."""
        try:
            self._runner.close()
        except RuntimeError as error:  # a failed device cannot free anything
            log.warning("the captured graphs were not freed: %s", error)
        self._followers.close()

    def prepare(self, plan: StepPlan) -> Any:
        host = self._runner.build(plan)
        self._followers.send(plan, host.decisions)
        try:
            return self._runner.upload(host)
        except Exception as error:
            raise _out_of_step(error) from error

    def execute(self, batch: Any) -> PendingStep:
        try:
            return self._runner.execute(batch)
        except Exception as error:
            raise _out_of_step(error) from error

    def sample(self, pending: Any, masks: tuple[Int32Array, Int32Array] | None) -> None:
        try:
            self._runner.sample(pending, masks)
        except Exception as error:
            raise _out_of_step(error) from error

    def grammar_bitmask(self, count: int) -> Int32Array:
        return self._runner.grammar_bitmask(count)


class LeaderAdapters:
    """Rank 0's adapters: each change is told to the followers first."""

    def __init__(self, host: AdapterHost, followers: Followers) -> None:
        self._host = host
        self._followers = followers

    def begin(self, number: int, folder: str) -> None:
        self._followers.tell(AdapterTask("begin", number, folder))
        self._host.begin(number, folder)

    def is_read(self, number: int) -> bool:
        return self._host.is_read(number)

    def keep(self, number: int) -> bytes | None:
        self._followers.tell(AdapterTask("keep", number))
        return self._host.keep(number)

    def drop(self, number: int) -> None:
        self._followers.tell(AdapterTask("drop", number))
        self._host.drop(number)


def _json(settings: EngineConfig | Environment) -> str:
    return msgspec.json.encode(dataclasses.asdict(settings)).decode()


def _out_of_step(error: Exception) -> EngineDeadError:
    """The followers have executed, or wait inside, a step that rank 0 has not executed."""
    return EngineDeadError(f"rank 0 failed in a step that other ranks execute too: {type(error).__name__}: {error}")
