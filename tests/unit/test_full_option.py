"""`--full`: tests marked `full` run with it and are skipped without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.full
def test_long():
    pass

def test_short():
    pass
"""


@pytest.mark.parametrize(("options", "outcome"), [((), "1 passed, 1 skipped"), (("--full",), "2 passed")])
def test_full(tmp_path: Path, options: tuple[str, ...], outcome: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), *options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert outcome in done.stdout, done.stdout + done.stderr
