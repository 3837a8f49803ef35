"""The source archive and the wheel: what they hold, and that the wheel serves where there is no checkout."""

from __future__ import annotations

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import minisgl_backend
from benchmarks.served import free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.kernels.cpu.sources import INSTRUCTION_SETS, packed_name
from tests.e2e.conftest import START_SECONDS, STOP_SECONDS
from tests.e2e.openai_stack import fetch_url
from tests.packaging.installed import ROOT, Distribution, Installation, build, install


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    pytest.importorskip("hatchling")
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installation(distribution: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(distribution.wheel, tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_the_wheel_takes_no_name_that_belongs_to_others(distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    version = minisgl_backend.__version__
    assert names == {"minisgl_backend", "minisgl_client", f"minisgl_backend-{version}.dist-info"}


def test_the_wheel_holds_all_that_is_served(distribution: Distribution) -> None:
    assert distribution.wheel.stat().st_size < 25e6
    with zipfile.ZipFile(distribution.wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"minisgl_backend-{minisgl_backend.__version__}.dist-info/METADATA").decode()
    for folder, name in (("minisgl_backend", "minisgl_backend"), ("client", "minisgl_client")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"{name}/{path.relative_to(ROOT / folder)}" for path in files} <= names
    repository = ROOT / "model_repository"
    files = [path for path in repository.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {f"minisgl_backend/model_repository/{path.relative_to(repository)}" for path in files} <= names
    # An archive keeps no empty folders: each model's version folder must hold a file.
    for model in repository.iterdir():
        assert any(name.startswith(f"minisgl_backend/model_repository/{model.name}/1/") for name in names), model
    assert re.search(rf"^Version: {re.escape(minisgl_backend.__version__)}$", metadata, re.MULTILINE)


def test_the_wheel_holds_the_kernels_of_cpus_where_there_is_a_compiler(distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as archive:
        packed = {name for name in archive.namelist() if "/kernels/cpu/packed/" in name}
    if shutil.which("g++") is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        assert distribution.wheel.name.endswith("-py3-none-any.whl")
        assert not packed
        return
    assert distribution.wheel.name.endswith("-py3-none-manylinux_2_35_x86_64.whl")
    assert packed == {f"minisgl_backend/kernels/cpu/packed/{packed_name(one)}" for one in INSTRUCTION_SETS}


def test_the_metadata_says_what_an_index_shows(distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as archive:
        folder = f"minisgl_backend-{minisgl_backend.__version__}.dist-info"
        told = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        licences = {name.removeprefix(f"{folder}/licenses/") for name in archive.namelist() if "/licenses/" in name}
    assert told["License-Expression"] == "Apache-2.0 AND MIT AND BSD-3-Clause"
    vendored = ROOT / "minisgl_backend" / "openai" / "page" / "files" / "vendor"
    scripts = {path.name.split(".")[0] for path in vendored.glob("*.js")}
    assert {Path(name).name.split(".")[0] for name in licences if "vendor" in name} == scripts, "of each its own"
    assert "LICENSE" in licences
    classifiers = told.get_all("Classifier", [])
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.10"} <= set(classifiers)
    assert not any(name.startswith("License ::") for name in classifiers), "the expression says it"
    assert told["Description-Content-Type"].startswith("text/markdown")
    text = told.get_payload()
    assert isinstance(text, str)
    assert text.startswith((ROOT / "README.md").read_text(encoding="utf-8")[:40])
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert links
    assert [link for link in links if not link.startswith("https://")] == [], "they would lead nowhere"
    assert "docs/chat.png" not in text


def test_a_client_needs_no_torch(distribution: Distribution) -> None:
    """All that `pip install WHEEL[client]` brings, by the metadata of what is installed here. 34 MB are downloaded in
    November 2026, half of it this wheel."""
    with zipfile.ZipFile(distribution.wheel) as archive:
        text = archive.read(f"minisgl_backend-{minisgl_backend.__version__}.dist-info/METADATA").decode()
    wanted, found = [Requirement(line) for line in Parser().parsestr(text).get_all("Requires-Dist", [])], set()
    todo = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": "client"})]
    while todo:
        requirement = todo.pop()
        if canonicalize_name(requirement.name) in found:
            continue
        found.add(canonicalize_name(requirement.name))
        for line in metadata.requires(requirement.name) or []:
            further = Requirement(line)
            extras = requirement.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(further)
    assert {"aiohttp", "grpcio", "protobuf", "rich", "typer"} <= found
    assert found & {"numpy", "torch", "transformers", "triton", "tritonclient", "tokenizers"} == set()
    size = sum(
        file.locate().stat().st_size
        for name in found
        for file in metadata.files(name) or []
        if file.suffix != ".pyc" and file.locate().is_file()
    )
    assert size < 80e6  # unpacked: three times what is downloaded


def test_an_installed_wheel_needs_no_checkout(installation: Installation, empty: Path) -> None:
    assert installation.run(empty, "minisgl", "--version").stdout == f"minisgl-backend {minisgl_backend.__version__}\n"
    code = """
import importlib.util, minisgl_backend, minisgl_client
from minisgl_backend.models.folder import find_model_dir
assert importlib.util.find_spec("client") is None
assert issubclass(minisgl_client.Unavailable, minisgl_client.ClientError)
print(find_model_dir("demo").parents[1] / "ensemble" / "1")
"""
    done = installation.run(empty, "python", "-c", code)
    assert Path(done.stdout.strip()) == installation.site_packages / "minisgl_backend/model_repository/ensemble/1", done
    assert Path(done.stdout.strip()).is_dir()
    wrong = installation.run(empty, "minisgl", "serve", "--page-size", "3")
    assert (wrong.returncode, wrong.stderr) == (2, "[serve] error: page_size is 3; allowed: a power of two\n")
    assert "usage: minisgl serve [MODEL]" in installation.run(empty, "minisgl", "serve", "--help").stdout
    module = installation.run(empty, "python", "-m", "minisgl_client", "status", "--url", "127.0.0.1:1")
    assert (module.returncode, module.stdout) == (1, "server: does not answer; ensemble: not ready\n"), module


@pytest.mark.e2e
def test_an_installed_wheel_serves(installation: Installation, empty: Path, tmp_path: Path) -> None:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(f"no tritonserver: {error}")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    http, grpc, metrics, health, openai = free_ports(5)
    command = [installation.command("minisgl"), "serve", "--page-size", "16"]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("health", health), ("openai", openai)):
        command += [f"--{name}-port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=empty, env=installation.environment(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while fetch_url(f"http://127.0.0.1:{openai}/health")[0] != 200:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.2)
        question = '{"text_input": "What is 17 + 25?", "max_tokens": 32, "temperature": 0}'
        url = f"http://127.0.0.1:{http}/v2/models/ensemble/generate"
        assert json.loads(curl(url, "-d", question))["text_output"] == "17 + 25 = 42."
        chat = '{"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
        url = f"http://127.0.0.1:{openai}/v1/chat/completions"
        answer = curl(url, "-H", "Content-Type: application/json", "-d", chat)
        assert json.loads(answer)["choices"][0]["message"]["content"] == "17 + 25 = 42."
        said = installation.run(empty, "minisgl", "generate", "What is 17 + 25?", "--url", f"127.0.0.1:{grpc}")
        assert said.stdout == "17 + 25 = 42.\n", said
        assert list(empty.iterdir()) == []
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(STOP_SECONDS) == 0
        finally:
            process.kill()
            process.wait()


def curl(url: str, *arguments: str) -> str:
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-m", "60", url, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_imports_itself_by_no_name() -> None:
    """Its package has two names."""
    absolute = re.compile(r"^\s*(?:from|import) (?:minisgl_)?client\b", re.MULTILINE)
    assert [path for path in (ROOT / "client").rglob("*.py") if absolute.search(path.read_text(encoding="utf-8"))] == []
