"""NumPy 2 wherever the server's wheel has no part: LLM, the core process, the codec, the streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
NUMPY_2 = Path(sys.prefix) / "numpy2"  # scripts/setup.sh puts it there, beside the one that the wheel's stub needs
# What hands arrays on: the codecs of tensors and of plans, the streams, the core process.
TESTS = (
    "unit/ipc/test_plan_codec.py",
    "unit/serving/test_codec.py",
    "unit/delivery/test_stream.py",
    "integration/test_engine_process.py::test_answers_refusals_and_counters",
)
MORE_TESTS = ("unit/test_llm.py", "unit/text", "unit/ipc", "unit/serving", "unit/delivery", TESTS[-1])  # with --full


@pytest.mark.skipif(int(np.__version__.split(".")[0]) >= 2, reason="all tests run with NumPy 2 here")
@pytest.mark.skipif(not (NUMPY_2 / "numpy").is_dir(), reason="no NumPy 2 in .venv/numpy2: scripts/setup.sh dev")
@pytest.mark.timeout(1800)  # a minute where nothing else runs
def test_with_numpy_2(pytestconfig: pytest.Config) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(NUMPY_2), str(ROOT)])}
    version = subprocess.run(
        [sys.executable, "-c", "import numpy; print(numpy.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.startswith("2.")
    tests = MORE_TESTS if pytestconfig.getoption("--full", default=False) else TESTS
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
