"""LiteLLM and LlamaIndex, unmodified, on embeddings, reranking, decisions: an environment of its own, with --full."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import environment_behind

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).parent / "frameworks" / "embeddings_of_litellm_and_llama_index.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding_clients")
    return environment_behind(folder, "litellm", "llama-index-embeddings-openai-like")


def test_the_program(endpoint: Endpoint, python: Path) -> None:
    done = subprocess.run(
        [python, PROGRAM, f"{endpoint.url}/v1", f"http://127.0.0.1:{endpoint.server.http}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "all is well"), done.stdout[-3000:]
