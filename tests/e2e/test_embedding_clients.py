"""Clients of embeddings, reranking, decisions and structured output, unmodified, in an environment of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import environment_behind, output_of

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).parent / "frameworks"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = ("embeddings-openai-like", "embeddings-text-embeddings-inference", "postprocessor-tei-rerank")
    folder = tmp_path_factory.mktemp("embedding_clients")
    return environment_behind(folder, "litellm", "rerankers", *(f"llama-index-{name}" for name in packages))


def check(python: Path, program: str, *arguments: str) -> None:
    # huggingface_hub asks no server at all where it is offline; LiteLLM looks for prices on the web.
    environment = {"HF_HUB_OFFLINE": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = output_of([python, PROGRAMS / program, *arguments], PATIENCE_SECONDS, **environment)
    assert said.endswith("all is well\n"), said


def test_openais_and_tritons_shapes(endpoint: Endpoint, python: Path) -> None:
    triton = f"http://127.0.0.1:{endpoint.server.http}"
    check(python, "embeddings_of_litellm_and_llama_index.py", f"{endpoint.url}/v1", triton)


def test_the_shapes_of_text_embeddings_inference(endpoint: Endpoint, python: Path) -> None:
    check(python, "clients_of_text_embeddings_inference.py", endpoint.url)


def test_hugging_faces_answers_by_a_schema(endpoint: Endpoint, python: Path) -> None:
    check(python, "structured_output_of_huggingface_hub.py", endpoint.url)
