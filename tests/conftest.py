"""What must be set before anything is imported, whatever part of the tests runs; the options."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Triton decides once, when it is first imported (xgrammar and transformers may do that), whether kernels are compiled
# or interpreted. Without a GPU only its interpreter can run them.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# NumPy's products take one core, too, as torch's below: those of the interpreter are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C tests would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The size of the terminal, as readline hands it to the workers of pytest-xdist: to programs that a test starts in a
# terminal of its own it would be a lie.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("COLUMNS", "LINES"):
        os.environ.pop(variable, None)

# Under pytest-xdist one worker runs a file from beginning to end, so that a module's fixtures are made once, and all
# files of a group as if they were one. Tests of Ctrl-C, other signals and real time-outs are one, near the end of a
# run, when others have at most such files left as the one below has, which take one core:
SERIAL = (
    "unit/client/test_chat_session.py",
    "unit/client/test_ctrl_c.py",
    "unit/client/test_load_generator.py",
    "unit/grammar/test_grammar_compilers.py",
    "unit/grammar/test_time_budget.py",
    "unit/process/test_stop_signals.py",
    "unit/test_steal_watch.py",
)
# End to end, all but these share the servers that a session starts once:
OWN_SERVERS = (
    "e2e/test_anthropic.py",
    "e2e/test_batches_faults.py",
    "e2e/test_data_parallel_server.py",
    "e2e/test_fair_shares.py",
    "e2e/test_new_repository_served.py",
    "e2e/test_nodes_server.py",
    "e2e/test_nvidia_scripts.py",
    "e2e/test_openai_scripted.py",
    "e2e/test_openai_supervised.py",
    "e2e/test_other_tools.py",
    "e2e/test_path.py",
    "e2e/test_supervised_faults.py",
    "e2e/test_supervision.py",
    "e2e/test_windows.py",
)

# Files that only compute, in one process and by no clock. A third worker, which `scripts/test.sh` starts, runs nothing
# else, at a low priority: in the time in which the two others wait for their servers.
COMPUTES = (
    "unit/kernels/test_interpreted_",
    "unit/kernels/test_specialization",
    "unit/kernels/test_shared_memory",
    "parity/test_windows_interpreted",
    "integration/test_long_steps",
    "parity/test_llm_parity",
    "parity/test_parity_benchmark",
    "parity/test_logits_parity",
    "parity/test_fallback",
    "parity/test_fp8_checkpoints",
    "parity/test_int4_checkpoints",
    "unit/scheduler/test_scheduler",
    "unit/test_plot",
    "unit/attention/test_reference_attention",
    "unit/sampling/test_sampler",
    "unit/layers/test_decoder_layer",
    "unit/cache/test_cache_model",
)
FILLER = "gw2"  # that worker's name
FILLER_NICE = 10  # a tenth of a core where all are busy: none of its tests comes to its time-out

# Other people's tests, which tests/e2e/test_third_party_clients.py runs against a server.
collect_ignore = ["third_party", "e2e/vllm_ci"]


@pytest.fixture(scope="session", autouse=True)
def torch_takes_one_core() -> Iterator[None]:
    """As an engine does with models as small as those of tests (`ONE_CORE_WEIGHT_BYTES`). Two cores that wake each
    other for every product are up to ten times slower; servers, ranks and compilers of grammars need the other one."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def files_are_kept_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the OpenAI endpoints that tests start by the server's command line, not in the user's home."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(autouse=True)
def logging_stays_as_it_is() -> Iterator[None]:
    """A command that runs in the tests' process logs to the stderr of its test, which is closed after it."""
    package = logging.getLogger("minisgl_backend")
    handlers, level, propagate = list(package.handlers), package.level, package.propagate
    yield
    package.handlers, package.level, package.propagate = handlers, level, propagate


@pytest.fixture(scope="session")
def frameworks_python() -> str:
    """A Python with LangChain and LlamaIndex: the extra `frameworks`."""
    python = Path(sys.prefix) / "frameworks" / "bin" / "python"
    if not python.exists():
        pytest.skip("LangChain and LlamaIndex are not installed: bash scripts/setup.sh")
    return str(python)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked `full`, which take minutes each")
    group = parser.getgroup("demo gauge")
    group.addoption("--full-matrix", action="store_true", help="every cell of the matrix, with --questions of a kind")
    group.addoption("--questions", type=int, default=50, help="questions of each kind in the full matrix (50)")


def worker_group(path: str) -> str:
    """What one worker runs without a break, of a test file's path."""
    if path.endswith(SERIAL):
        return "serial"
    if "tests/e2e/" in path and not path.endswith(OWN_SERVERS):
        return "servers"
    return path


def worker_turn(path: str) -> int:
    """What takes long comes first, near the end what a busy machine could mislead, and what keeps it quiet last."""
    group = worker_group(path)
    if group == "servers":
        return 0
    if path.endswith(OWN_SERVERS):
        return 1
    if group == "serial":
        return 3
    return next((4 + turn for turn, name in enumerate(COMPUTES) if f"tests/{name}" in path), 2)


def only_computes(group: str) -> bool:
    return worker_turn(group) > 3


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") == "worksteal":  # asked for: xdist's own, which also spreads the tests of one file
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid.partition("::")[0])

        def _assign_work_unit(self, node: Any) -> None:
            if node.gateway.id == FILLER:
                chosen = next(filter(only_computes, self.workqueue), None)
                if chosen is None:
                    node.shutdown()
                    return
                self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") == FILLER:  # from here on: all workers wait for the last one's collection
        os.nice(FILLER_NICE)
        # Where Linux groups processes by session, that is a priority within a group: it gets a group of low priority.
        with contextlib.suppress(OSError):
            os.setsid()
            Path("/proc/self/autogroup").write_text(str(FILLER_NICE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: worker_turn(item.path.as_posix()))
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: scripts/test.sh --full"))
