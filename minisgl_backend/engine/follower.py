"""A tensor-parallel follower: `python -m minisgl_backend.engine.follower` repeats the steps that rank 0 schedules.

Started by rank 0, or by its own node (`host/node_supervisor.py`) if that is another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.cpu_threads import share_cores
from minisgl_backend.engine.followers import HOST, LENGTH
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.plan_codec import AdapterTask, unpack
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.process.liveness import Heartbeat, Sign
from minisgl_backend.process.spawn import TIED, begin_child, log_to_stderr
from minisgl_backend.runner.adapter_host import AdapterHost
from minisgl_backend.runner.async_output import PendingStep, UnsampledStep
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.build import build_runner
from minisgl_backend.runner.start.compiling import announce_compiling
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.prefill_budget import measure_prefill_budget
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.states import fit_rows
from minisgl_backend.tensor_parallel import TensorParallel, device_of_rank

log = logging.getLogger("minisgl_backend.engine.follower")  # __name__ is __main__ here


def main(arguments: list[str] | None = None) -> int:
    """Runs a follower: builds its part of the model, then executes rank 0's plans until the link closes."""
    parser = argparse.ArgumentParser(description="A tensor-parallel rank of the engine; started by its node.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--dp-rank", type=int, required=True, help="number of the engine core that it belongs to")
    parser.add_argument("--port", type=int, required=True, help="of this machine: leads to the ranks' store")
    parser.add_argument("--link-fd", type=int, required=True, help="a connection to rank 0")
    parser.add_argument("--address", default="", help="of this machine, as ranks of other nodes see it")
    parser.add_argument("--config", required=True, help="rank 0's engine options as JSON")
    parser.add_argument("--environment", required=True, help="what rank 0 read of its environment variables, as JSON")
    parser.add_argument(TIED, action="store_true")
    options = parser.parse_args(arguments)
    begin_child(f"rank {options.rank}", "INFO", tied=options.tied)
    try:
        environment = Environment(**msgspec.json.decode(options.environment))
        config = EngineConfig(**msgspec.json.decode(options.config))
        name = f"rank {options.rank}" if config.dp == 1 else f"engine {options.dp_rank} rank {options.rank}"
        log_to_stderr(name, environment.log_level)
        heartbeat = Heartbeat(environment.hang_s)
        with socket.socket(fileno=options.link_fd) as link:
            heartbeat.start(lambda sign: _tell(link, sign))
            runner, adapters = _build(config, environment, options, heartbeat)
            _mirror(runner, adapters, link, heartbeat)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    except Exception as error:
        if isinstance(error, EngineDeadError):  # another rank's failure
            log.error("%s", error)
        else:
            log.exception("rank %d failed", options.rank)
        sys.stderr.flush()
        os._exit(1)  # other threads may wait in a collective for ever
    return 0


def _tell(link: socket.socket, sign: Sign) -> None:
    with contextlib.suppress(OSError):  # rank 0 has gone or does not read: either ends this process in another way
        link.send(sign, socket.MSG_DONTWAIT)


def _build(
    config: EngineConfig, environment: Environment, options: argparse.Namespace, heartbeat: Heartbeat
) -> tuple[ModelRunner, AdapterHost | None]:
    model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
    model = load_model_config(model_dir, config.model_impl, trust_remote_code=config.trust_remote_code)
    model = model.reading(images=config.encoder_cache_bytes > 0)
    runtime = resolve(config, model_dir, model, MachineFacts.detect(), environment, dp_rank=options.dp_rank)
    device = device_of_rank(runtime.device, runtime.device_index(options.rank))
    tp = TensorParallel.connect(
        options.rank, config.tp, HOST, options.port, device, address=options.address, shared=runtime.shared()
    )
    tp.note_waits(heartbeat.waiting)
    runtime = fit_rows(runtime, model, tp)
    announce_compiling(runtime.device, heartbeat.compiling, heartbeat.compiled)
    runner = build_runner(runtime, model, tp)
    share_cores(runtime, runner)
    measure_prefill_budget(runner, runtime, model.vocab_size, tp)  # takes part in the steps of all ranks
    heartbeat.ready(on_cpu=runtime.device == "cpu")
    return runner, None if runner.adapters is None else AdapterHost(runner.adapters, tp)


def _mirror(runner: ModelRunner, adapters: AdapterHost | None, link: socket.socket, heartbeat: Heartbeat) -> None:
    previous: PendingStep | UnsampledStep | None = None
    while (frame := _read_frame(link)) is not None:
        with heartbeat.step():
            told = unpack(frame)
            if isinstance(told, AdapterTask):
                if previous is not None:  # whose collectives come first
                    previous.wait()
                assert adapters is not None, "rank 0 has some, too"
                _obey(adapters, told)
                continue
            pending = runner.execute(runner.mirror(*told))
            if previous is not None:
                previous.wait()  # at most two steps in flight, as on rank 0; also surfaces the device's errors
            previous = pending


def _obey(adapters: AdapterHost, task: AdapterTask) -> None:
    if task.method == "begin":
        adapters.begin(task.number, task.folder)
    elif task.method == "drop":
        adapters.drop(task.number)
    else:
        try:
            adapters.keep(task.number)
        except ConfigError as error:  # no rank has it, and rank 0 answers
            log.error("an adapter cannot be loaded: %s", error)


def _read_frame(link: socket.socket) -> bytes | None:
    header = _read_exactly(link, LENGTH.size)
    return None if header is None else _read_exactly(link, LENGTH.unpack(header)[0])


def _read_exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = link.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # NCCL's orderly shutdown would wait for the other ranks
