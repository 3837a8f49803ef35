"""NVIDIA's aiperf, unmodified, on the OpenAI-compatible endpoint: an environment of 800 MB, so with --full only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import PATIENCE_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

DEMO = ROOT / "model_repository" / "engine" / "demo_model"
REQUESTS, OUTPUT_TOKENS = 20, 24


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment that takes from this one what it can: aiperf wants other versions of some."""
    folder = tmp_path_factory.mktemp("aiperf")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "aiperf==0.13.0"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("pip cannot install aiperf here")
    return folder / "bin" / "aiperf"


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf(endpoint: Endpoint, aiperf: Path, tmp_path: Path, kind: str, streaming: bool) -> None:
    command = [str(aiperf), "profile", "-m", "demo", "--url", endpoint.url, "--endpoint-type", kind]
    command += ["--streaming"] if streaming else []
    command += ["--tokenizer", str(DEMO), "--use-server-token-count", "--ui", "none", "--artifact-dir", str(tmp_path)]
    command += ["--concurrency", "4", "--request-count", str(REQUESTS), "--isl", "60", "--osl", str(OUTPUT_TOKENS)]
    # With this variable aiperf takes a folder for the name of a hub's model.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [*command, "--extra-inputs", "ignore_eos:true"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert figures["request_count"]["avg"] == REQUESTS
    assert not figures.get("error_summary"), figures["error_summary"]
    if (kind, streaming) != ("responses", True):  # there it reads no counts of answers that end at their limit
        assert figures["output_sequence_length"]["avg"] == OUTPUT_TOKENS
    assert ("time_to_first_token" in figures) == streaming
