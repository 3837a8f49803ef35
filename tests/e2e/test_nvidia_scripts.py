"""NVIDIA's own test scripts of tensorrtllm_backend, unmodified, against the model `llmapi` under their model's name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, RunningServer
from tests.e2e.wire import Server

# They need pandas, which nothing else does, in an environment of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1200)]

SCRIPTS = ROOT / "tests" / "third_party" / "tensorrtllm_backend"
GRPC_PORT = 8001  # which one of them does not let choose
RENAMED = {"tensorrt_llm": "llmapi_infer", "tensorrt_llm_stream": "llmapi"}


def written_by_init(repository: Path) -> None:
    shutil.rmtree(repository)
    command = [sys.executable, "-m", "client", "init", "--model", "demo", "--infer", "--out", str(repository)]
    subprocess.run(command, check=True, cwd=ROOT)
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        shutil.rmtree(repository / name)
    for name, of in RENAMED.items():
        shutil.copytree(repository / of, repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace(f'name: "{of}"', f'name: "{name}"', 1))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", GRPC_PORT)) == 0:
            pytest.skip(f"port {GRPC_PORT} is taken")
    with RunningServer(tmp_path_factory.mktemp("nvidia"), {}, prepare=written_by_init, grpc_port=GRPC_PORT) as found:
        yield found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvidia_python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "pandas", "tabulate"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("pip cannot install pandas here")
    return folder / "bin" / "python"


def test_cancelling_by_a_second_request(served: Server, tmp_path: Path) -> None:
    package = tmp_path / "triton_backend" / "tools"
    package.mkdir(parents=True)
    (package / "llmapi_client.py").symlink_to(SCRIPTS / "llmapi_client.py")
    said = run(Path(sys.executable), "tools/tests/test_llmapi_cancel.py", path=tmp_path)
    assert said.count("Output text: The current time is") == 2


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("http", ["--model-name", "tensorrt_llm", "--output-config", "{'return_finish_reason': True}"]),
        ("grpc", ["--model-name", "tensorrt_llm"]),
        ("grpc", ["--model-name", "tensorrt_llm_stream", "--streaming"]),
    ],
    ids=["http", "grpc", "stream"],
)
def test_end_to_end(served: Server, python: Path, tmp_path: Path, protocol: str, options: list[str]) -> None:
    dataset = tmp_path / "dataset.json"
    lines = [{"input": "What is", "instruction": f"{number} + 4?", "output": "It is a number."} for number in range(12)]
    dataset.write_text(json.dumps(lines))
    url = f"127.0.0.1:{served.http if protocol == 'http' else served.grpc}"
    asked = ["--dataset", dataset, "--max-input-len", 100, "--test-llmapi", "-i", protocol, "-u", url, *options]
    said = run(python, "tools/inflight_batcher_llm/end_to_end_test.py", *asked)
    assert "[INFO] Functionality test succeeded." in said
    assert "[INFO] Total Latency:" in said


def run(python: Path, script: str, *options: object, path: Path | None = None) -> str:
    command = [python, SCRIPTS / script, *options]
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
