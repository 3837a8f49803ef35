"""LangChain and LlamaIndex before the OpenAI-compatible endpoint: programs as their users write them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e

PROGRAMS = Path(__file__).parent / "frameworks"


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("with_*.py")), ids=lambda program: program.stem)
def test_programs(endpoint: Endpoint, frameworks_python: str, program: Path) -> None:
    done = subprocess.run(
        [frameworks_python, str(program), f"{endpoint.url}/v1"],
        # Neither may look for a tracing service or a proxy.
        env={**os.environ, "LANGSMITH_TRACING": "false", "NO_PROXY": "*"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is well"), done.stdout[-3000:]
