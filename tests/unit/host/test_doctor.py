"""`minisgl doctor` on this machine, on one without packages, and on machines that are made up."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import BACKENDS
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import doctor
from minisgl_backend.host.doctor import NOTE, OK, PROBLEM, Finding
from minisgl_backend.host.options.server import parse_arguments
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.process import installed

ROOT = Path(__file__).resolve().parents[3]

H100 = {
    "idle_cpus": {"asks": True, "allowed": False},
    "torch": {"version": "2.9.0+cu128", "cuda": "12.8", "folder": "/torch", "bytecode": True},
    "device": {"kind": "cuda", "name": "NVIDIA H100", "count": 2},
    "free_bytes": 79 << 30,
    "demo": {"dtype": "bfloat16", "attention": "triton", "page_size": 64},
    "attention": {
        "prefill": "triton",
        "decode": "triton",
        "page_size": 64,
        "warnings": ["fa,triton would be the best attention here, but fa needs sgl_kernel; to use it: pip install it"],
        "head_dim": 128,
        "tried": ["fa,triton", "triton", "torch"],
        "backends": {"fa": "needs the package sgl_kernel", "fi": None, "triton": None, "torch": None},
    },
}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f"{finding.section} {finding.name}": finding for finding in findings}


def told(answer: Mapping[str, Any], *, has_gpu: bool) -> dict[str, Finding]:
    """What becomes of the engine's answer."""
    return by_name(list(doctor._engine(answer, has_gpu)))


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is here: every section is there, and the exit status is what the report says."""
    status = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["can_serve_demo"] else 1)
    assert report["packages"]["torch"] is not None
    found = {f"{one['section']} {one['name']}": one for one in report["findings"]}
    assert {name.split()[0] for name in found} == set(doctor._SECTIONS)
    assert found["packages needed"]["state"] == OK
    assert {f"attention {name}" for name in BACKENDS} <= set(found)
    assert {f"ports {name}" for name in ("http", "grpc", "metrics", "health", "openai")} <= set(found)
    try:
        install = find_triton_server()
    except ConfigError:
        assert found["server tritonserver"]["state"] == PROBLEM
    else:
        assert str(install.binary) in found["server tritonserver"]["text"]


def test_the_report_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("machine", "gpu", OK, "none"),
        Finding("ports", "http", PROBLEM, "8000 is taken", "take another"),
        Finding("ports", "grpc", NOTE, "hm"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  PROBLEM http: 8000 is taken" in lines
    assert lines[lines.index("  PROBLEM http: 8000 is taken") + 1].strip() == "take another"
    assert lines[-1] == "The demo model cannot be served: 1 problem"  # which no installation mends
    missing = Finding("packages", "openai", PROBLEM, "fastapi is missing")
    monkeypatch.setattr(doctor, "examine", lambda: [missing])
    assert doctor.main([]) == 1
    assert "setup.sh installs what is missing" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: findings[::2])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.endswith("\nThe demo model can be served: minisgl serve\n")


def test_without_any_package_it_says_what_is_missing(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(tmp_path / "bare" / "bin" / "python"), "-m", "minisgl_backend.host.doctor", "--json"],
        env={**environment, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = {f"{one['section']} {one['name']}": one for one in json.loads(done.stdout)["findings"]}
    assert found["packages needed"]["state"] == PROBLEM
    if sys.version_info >= (3, 11):  # reads pyproject.toml
        assert "torch is missing" in found["packages needed"]["text"]
        assert found["packages grammar"]["state"] == NOTE
    else:
        assert "scripts/setup.sh" in found["packages needed"]["remedy"]
    assert found["packages torch"]["text"] == "cannot be used: ModuleNotFoundError: No module named 'torch'"
    assert found["server tritonserver"]["state"] == PROBLEM
    assert found["machine processors"]["state"] == OK


@pytest.mark.parametrize(
    ("requires", "versions", "has_gpu", "name", "state", "words"),
    [
        (
            ["torch>=2.5"],
            {},
            False,
            "needed",
            PROBLEM,
            ("torch is missing", "torch --index-url https:", "'torch>=2.5'"),
        ),
        (["torch>=2.5"], {}, True, "needed", PROBLEM, ("torch is missing", "-m pip install 'torch>=2.5'")),
        (["torch>=2.5"], {"torch": "2.4"}, True, "needed", PROBLEM, ("torch is 2.4, but >=2.5 is needed",)),
        (["torch>=2.5"], {"torch": "2.9.0+cu128"}, True, "needed", OK, ("torch 2.9.0+cu128",)),
        (
            ["numpy>=1.26,<2; extra == 'server'"],
            {"numpy": "2.4"},
            False,
            "server",
            PROBLEM,
            ("but >=1.26,<2 is needed",),
        ),
        (["fastapi>=0.1; extra == 'openai'"], {}, False, "openai", PROBLEM, ("fastapi is missing", "--openai-port 0")),
        (["tritonclient[all]>=2.5; extra == 'client'"], {}, False, "client", NOTE, ("'tritonclient[all]>=2.5'",)),
        (["xgrammar>=0.1; extra == 'grammar'"], {}, False, "grammar", NOTE, ("xgrammar is missing", "JSON schemas")),
        (["x; sys_platform == 'win32' and extra == 'grammar'"], {}, False, "grammar", OK, ()),
    ],
)
def test_packages(
    requires: list[str],
    versions: dict[str, str],
    has_gpu: bool,
    name: str,
    state: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed.metadata, "requires", lambda distribution: requires)
    monkeypatch.setattr(installed, "version_of", versions.get)
    monkeypatch.setattr(doctor, "_server_is_the_wheels", lambda: True)
    found = by_name(list(doctor._packages(has_gpu)))[f"packages {name}"]
    assert found.state == state
    assert all(word in found.text + found.remedy for word in words), found
    assert ("--index-url" in found.remedy) == (not has_gpu and "torch is missing" in found.text)


def test_a_busy_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listens = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
    # A process of its own: the one that runs the tests may have started servers of this project.
    code = f"{listens} print(s.getsockname()[1], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            port = other.stdout.readline().strip()
            monkeypatch.setattr(doctor, "parse_arguments", lambda _: parse_arguments(["--grpc-port", port]))
            found = by_name(list(doctor._ports()))
        finally:
            other.kill()
    assert found["ports grpc"].state == PROBLEM
    assert f"--grpc-port is {port}, which cannot be had" in found["ports grpc"].text


def test_a_port_of_a_server_of_this_project_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the process that listens runs this package's code or one that it started does, as the endpoint's."""
    listens = "import socket, subprocess, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
    waits = "import time; time.sleep(600)"
    below = f"subprocess.Popen([sys.executable, '-c', {waits!r}, 'minisgl_backend.openai.worker']);"
    for code, arguments in ((waits, ["minisgl_backend.x"]), (f"{below} {waits}", [])):
        told = f"{listens} print(s.getsockname()[1], flush=True); {code}"
        with subprocess.Popen(
            [sys.executable, "-c", told, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as server:
            try:
                assert server.stdout is not None
                port = server.stdout.readline().strip()
                monkeypatch.setattr(
                    doctor, "parse_arguments", lambda _, port=port: parse_arguments(["--grpc-port", port])
                )
                deadline = time.monotonic() + 60
                while (found := by_name(list(doctor._ports()))["ports grpc"]).state != NOTE:
                    assert time.monotonic() < deadline, found  # the process below may not have begun
                assert found.text == f"{port} is in use by a minisgl server (process {server.pid})"
                assert "minisgl serve --grpc-port ANOTHER" in found.remedy
            finally:
                os.killpg(server.pid, signal.SIGKILL)


def test_a_gpu_and_what_auto_takes_there() -> None:
    found = told(H100, has_gpu=True)
    assert found["packages torch"].text.startswith("2.9.0+cu128, for CUDA 12.8; models run on NVIDIA H100 (2 GPUs)")
    assert {"packages cuda12"} == {name for name in found if name.startswith("packages cuda")}
    newer = told({**H100, "torch": {**H100["torch"], "version": "2.13.0", "cuda": "13.0"}}, has_gpu=True)
    assert "sglang-kernel" in newer["packages cuda"].text
    assert found["attention auto"].state == NOTE
    assert "tries fa,triton, then triton, then torch" in found["attention auto"].text
    assert "pip install it" in found["attention auto"].remedy
    assert found["attention triton"].text == "auto takes it for prefill and decode"
    assert found["attention fi"].text == "works with --attn fi; auto prefers triton"
    assert found["attention fa"].text == "not here: needs the package sgl_kernel"
    assert found["machine idle processors"].state == NOTE
    assert "--device /dev/cpu_dma_latency" in found["machine idle processors"].remedy
    assert found["demo options"].text == "bfloat16, attention triton, pages of 64 tokens"
    assert all(finding.state != PROBLEM for finding in found.values())


def test_a_torch_that_each_process_compiles_is_told() -> None:
    assert "packages bytecode" not in told(H100, has_gpu=True)
    found = told({**H100, "torch": {**H100["torch"], "bytecode": False}}, has_gpu=True)["packages bytecode"]
    assert found.state == NOTE
    assert found.remedy.endswith("-m compileall -q /torch")


def test_a_torch_that_sees_no_gpu_serves_on_the_cpu() -> None:
    on_cpu = {**H100, "device": {"kind": "cpu", "name": "CPU", "count": 1}, "cpu_kernels": ""}
    found = told({**on_cpu, "torch": {**H100["torch"], "version": "2.9.0+cpu", "cuda": None}}, has_gpu=True)
    assert found["packages torch"].state == NOTE
    assert "it sees no GPU" in found["packages torch"].text
    assert "a build for the driver's CUDA" in found["packages torch"].remedy
    found = told(on_cpu, has_gpu=True)
    assert "too old for CUDA 12.8" in found["packages torch"].remedy


@pytest.mark.parametrize(
    ("refusal", "state", "text", "remedy"),
    [
        ("", OK, "compiled", ""),
        ("this processor has no AVX2 with FMA", OK, "no AVX2", ""),
        ("no C++ compiler is installed", NOTE, "float32: no C++ compiler", "install g++ 11"),
        ("/usr/bin/g++ cannot compile them: no headers", NOTE, "no headers", "CXX="),
    ],
)
def test_a_cpu_has_compiled_kernels_or_not(refusal: str, state: str, text: str, remedy: str) -> None:
    cpu = {"kind": "cpu", "name": "CPU", "count": 1}
    found = told({**H100, "device": cpu, "cpu_kernels": refusal}, has_gpu=False)["packages CPU kernels"]
    assert found.state == state
    assert text in found.text
    assert remedy in found.remedy
    assert "packages CPU kernels" not in told(H100, has_gpu=True)


def test_what_the_engine_refuses_is_a_problem() -> None:
    found = told({**H100, "refusal": "LOG_LEVEL is 'X'"}, has_gpu=True)
    assert (found["demo options"].state, found["demo options"].text) == (PROBLEM, "LOG_LEVEL is 'X'")
    assert told({"broken": "no torch"}, has_gpu=False)["packages torch"].state == PROBLEM


SMI = """#!/bin/sh
{body}
"""


@pytest.mark.parametrize(
    ("body", "names", "state", "words"),
    [
        ("echo '0, NVIDIA H100, 570.1, 81559 MiB, 9.0'; echo '1, X, 570.1, 1 MiB, 8.0'", ["gpu 0", "gpu 1"], OK, "9.0"),
        ("echo 'has failed because it could not communicate' >&2; exit 9", ["gpu"], NOTE, "could not communicate"),
        ("exit 0", ["gpu"], NOTE, "no GPU"),
    ],
)
def test_what_nvidia_smi_says(
    body: str, names: list[str], state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI.format(body=body))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = doctor._gpus()
    assert [finding.name for finding in found] == names
    assert found[0].state == state
    assert words in found[0].text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor._writable("cache", tmp_path / "not" / "yet", PROBLEM, "HOME").state == OK
    found = doctor._writable("cache", tmp_path / "file" / "below", PROBLEM, "HF_HOME")
    assert (found.state, found.remedy) == (PROBLEM, "HF_HOME=FOLDER chooses another")
    assert "Not a directory" in found.text
    assert doctor._writable("cache", Path("/proc/x"), PROBLEM, "HF_HOME").state == PROBLEM, "whatever its mode says"


@pytest.mark.parametrize(("free", "gpus", "state"), [(1 << 20, 0, PROBLEM), (64 << 20, 1, OK), (64 << 20, 2, NOTE)])
def test_shared_memory(free: int, gpus: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        f_bavail, f_frsize = free >> 10, 1 << 10

    monkeypatch.setattr(doctor.os, "statvfs", lambda path: Found)
    found = doctor._shared_memory(gpus)
    assert found.state == state
    assert (found.state == OK) == (not found.remedy)


def test_the_command_has_it() -> None:
    command = [sys.executable, "-m", "client", "doctor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("usage: minisgl doctor [-h] [--json]")


def test_the_command_checks_options_too() -> None:
    command = [sys.executable, "-m", "client", "check"]
    done = subprocess.run([*command, "demo", "--page-size", "32"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "Qwen3ForCausalLM" in done.stdout
    done = subprocess.run([*command, "--page-size", "3"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "error: page_size is 3; allowed: a power of two\n")


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    found = by_name(list(doctor._folders(0)))["folders sockets and copies"]
    assert (found.state, found.text) == (PROBLEM, "No usable temporary directory found in ['/tmp']")
    assert "TMPDIR=FOLDER" in found.remedy


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('hello'); print('{\"torch\": 1}'); print('bye'); print(7)", {"torch": 1}),
        ("print('hello')", {"broken": "the process ended with exit code 0"}),
        ("print('{}'); raise SystemExit('no torch')", {"broken": "no torch"}),
    ],
)
def test_libraries_may_print_around_the_report(code: str, answer: Mapping[str, Any]) -> None:
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as probe:
        assert doctor._answer(probe) == answer
