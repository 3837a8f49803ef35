"""What must be set before anything is imported, whatever part of the tests runs; the options."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton decides once, when it is first imported (xgrammar and transformers may do that), whether kernels are compiled
# or interpreted. Without a GPU only its interpreter can run them.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C tests would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: scripts/test.sh --full"))
