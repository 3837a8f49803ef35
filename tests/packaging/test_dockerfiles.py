"""The Dockerfiles: linted, and true to the project's extras, options and files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.host.options.server import parse_arguments
from tests.packaging.installed import ROOT

FOLDER = ROOT / "docs" / "deploy"
DOCKERFILES = sorted(path for path in FOLDER.glob("Dockerfile.*") if path.suffix != ".dockerignore")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_one_for_gpus_and_one_for_the_cpu() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


def test_linted(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "--no-color", str(dockerfile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_copied_is_enough_for_the_wheel(dockerfile: Path, tmp_path: Path) -> None:
    """Its own list of what to leave out keeps nothing that the wheel does not need."""
    lines = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    for name in (line[1:] for line in lines if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.stat().st_size > 5_000_000, "the demo model is inside"


def test_the_extras_exist(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    named = [*re.findall(r"\.whl\)\[([^]]+)\]", text), *re.findall(r"EXTRAS=([\w,]+)", text)]
    named += re.findall(r"kernels=(\w+)", text)
    extras = {extra for names in named for extra in names.split(",") if not extra.startswith("$")}
    assert extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE), extra


def test_json_schemas_come_without_triton_on_the_cpu() -> None:
    text = (FOLDER / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert re.search(
        r"pip install --no-deps .*xgrammar.*&& python -c \"import xgrammar\"$", text, re.DOTALL | re.MULTILINE
    )
    asked, others = re.findall(r'python -c "(from importlib\.metadata [^"]*)"', text)
    ours = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    assert f'grammar = ["{ours}"]' in PYPROJECT
    pytest.importorskip("xgrammar")
    needed = subprocess.run([sys.executable, "-c", others], capture_output=True, text=True, check=True).stdout
    assert any(line.startswith("torch") for line in needed.splitlines())
    assert not any(line.startswith("triton") for line in needed.splitlines())


def test_what_runs_is_a_command_line_of_ours(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[-1])
    assert entry[:4] == ["tini", "--", "minisgl", "serve"]
    arguments = parse_arguments(entry[4:])
    exposed = re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[-1].split()
    assert sorted(map(int, exposed)) == sorted(port for _, port in arguments.ports)
    assert f"127.0.0.1:{arguments.server.health_port}/health/ready" in text
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] not in ("root", "0")
