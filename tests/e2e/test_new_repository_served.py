"""A repository that `minisgl init` wrote, served by a tritonserver without the supervisor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from client import Client
from tests.e2e.conftest import ROOT, RunningServer

pytestmark = pytest.mark.e2e

MODEL = ROOT / "model_repository" / "engine" / "demo_model"


def test_a_bare_server_serves_what_init_wrote(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    shutil.copytree(MODEL, model)

    def init(repository: Path) -> None:
        shutil.rmtree(repository)
        options = ["--model", str(model), "--max-seq-len-override", "48", "--out", str(repository)]
        subprocess.run([sys.executable, "-m", "client", "init", *options], check=True, cwd=ROOT)

    with RunningServer(tmp_path, {}, prepare=init) as server, Client(f"127.0.0.1:{server.grpc}") as client:
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        assert client.generate(messages=question, temperature=0).text == "17 + 25 = 42."
        answer = client.generate(messages=[{"role": "user", "content": "Count from 1 to 200."}], temperature=0)
        assert answer.num_input_tokens + answer.num_output_tokens == 48, "the option is in force"
