"""Other people's clients with images, unmodified, before a tiny model that sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.e2e.image_stack import PICTURES, Stack, running_stack
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import environment_behind, output_of

# Each installs what it tries first.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

NVIDIA = ROOT / "tests" / "third_party" / "tensorrtllm_backend" / "tools" / "multimodal" / "client.py"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pictures, of two sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / "large.png", folder / "small.png"]
    for file, one in zip(found, [PICTURES[0], PICTURES[1].crop((0, 0, 28, 28))], strict=True):
        one.save(file)
    return found


@pytest.fixture(scope="module")
def nvidias_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_behind(tmp_path_factory.mktemp("nvidia"), "pandas", "tabulate")


@pytest.mark.parametrize("kind", ["qwen2_vl", "mllama"])
@pytest.mark.parametrize("model", [[], ["--use_bls"]], ids=["ensemble", "bls"])
def test_nvidias_multimodal_client(
    stack: Stack, files: list[Path], nvidias_python: Path, kind: str, model: list[str]
) -> None:
    """It sends pixels, and a question without places for them."""
    command = [nvidias_python, NVIDIA, "-u", f"127.0.0.1:{stack.server.grpc}", "--model_type", kind, "--streaming"]
    options = ["--image", files[0], "--text", "which?", "--prompt_table_extra_id", 5, "--request-output-len", 6]
    said = output_of([*command, *options, *model], PATIENCE_SECONDS)
    assert "[beam 0 ]: " in said
