"""The command line of scripts/serve.sh, the readiness endpoint and the process table; no server is started."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import minisgl_backend
from minisgl_backend.config import OPTIONS
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import doctor
from minisgl_backend.host.health import HealthServer
from minisgl_backend.host.options.endpoint import EndpointSettings, api_keys_of
from minisgl_backend.host.options.server import ADMIN_APIS, parse_arguments
from minisgl_backend.host.server_process import server_arguments
from minisgl_backend.host.server_supervisor import Supervisor, main
from minisgl_backend.host.triton_server import TritonInstall
from minisgl_backend.process.ports import free_port_error
from minisgl_backend.process.processes import ServerProcesses, descendants, process_table


def test_defaults_serve_the_demo_model_on_this_machine_only() -> None:
    arguments = parse_arguments([])
    assert arguments.engine_parameters == {}
    assert arguments.server.host == "127.0.0.1"
    assert (arguments.server.http_port, arguments.server.grpc_port, arguments.server.metrics_port) == (8000, 8001, 8002)


def test_the_example_suits_the_model(tmp_path: Path) -> None:
    demo = parse_arguments([]).example_command(has_chat_template=True)
    assert demo.endswith("""generate -d '{"max_tokens":32,"text_input":"What is 17 + 25?"}'""")
    assert "17 + 25" in parse_arguments(["demo", "--tp", "2"]).example_command(has_chat_template=True)
    assert "What colour" in parse_arguments(["demo-vl"]).example_command(has_chat_template=True)
    (tmp_path / "config.json").write_text("{}")
    arguments = parse_arguments([str(tmp_path)])
    assert "9000/v1/chat/completions" in arguments.example_command(has_chat_template=True)
    assert '"text_input":"The capital' in arguments.example_command(has_chat_template=False)
    alone = parse_arguments([str(tmp_path), "--openai-port", "0"])
    assert '"text_input":"The capital' in alone.example_command(has_chat_template=True)


def test_log_level_counts_for_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not parse_arguments([]).server.quiet
    monkeypatch.setenv("LOG_LEVEL", "warning")
    assert parse_arguments([]).server.quiet
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOG_LEVEL is 'LOUD'; allowed: DEBUG"):
        parse_arguments([])


def test_the_openai_endpoint_is_on_unless_told_otherwise() -> None:
    fetching = parse_arguments(["--allowed-media-domains", "a.example", "*.b.example"])
    assert fetching.endpoint is not None
    assert fetching.endpoint.media_domains == ("a.example", "*.b.example")
    assert fetching.engine_parameters["media_domains"] == "a.example,*.b.example"
    endpoint = parse_arguments(["--host", "0.0.0.0", "--grpc-port", "9", "--served-model-name", "a", "b"]).endpoint
    assert endpoint is not None
    assert (endpoint.host, endpoint.port, endpoint.grpc_address) == ("0.0.0.0", 9000, "127.0.0.1:9")
    assert endpoint.served_model_names == ("a", "b")
    assert EndpointSettings.from_json(endpoint.to_json()) == endpoint
    assert parse_arguments(["--openai-port", "0"]).endpoint is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--openai-port", "8003"], "--openai-port is 8003, and so is --health-port"),
        (["--openai-workers", "0"], "--openai-workers is 0; allowed: 1 or more"),
        (["--ssl-certfile", "/none"], "--ssl-certfile and --ssl-keyfile belong together"),
        (["--ssl-certfile", "/none", "--ssl-keyfile", "/none"], "--ssl-certfile is '/none', which is no file"),
        (["--max-body-bytes", "0"], "--max-body-bytes is 0; allowed: 1 or more"),
    ],
)
def test_wrong_options_of_the_endpoint(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--http-port", "28000", "--grpc-port", "28001", "--metrics-port", "28002"]) == 2
    assert message in capsys.readouterr().err


def test_tritons_own_folder_is_judged_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As below a root that is read-only, where TMPDIR leads elsewhere."""
    (tmp_path / "file").touch()
    for folder, why in ((Path("/proc/x"), "No such file or directory"), (tmp_path / "file", "Not a directory")):
        monkeypatch.setattr("minisgl_backend.process.writable._TRITONS_FOLDER", folder)
        monkeypatch.setattr("minisgl_backend.host.server_supervisor.find_triton_server", lambda: None)
        monkeypatch.setattr("minisgl_backend.host.server_supervisor._check_ports", lambda arguments: None)
        assert main([]) == 2
        told = f"{folder} cannot be written, and Triton's Python backend needs it: {why}; mount one that can: in Docker"
        assert told in capsys.readouterr().err
        found = {finding.name: finding for finding in doctor._folders(0)}["/tmp"]
        assert (found.state, why in found.text, "emptyDir" in found.remedy) == (doctor.PROBLEM, True, True)


def test_keys_come_from_the_command_line_or_the_environment() -> None:
    assert api_keys_of(None, {"MINISGL_API_KEY": "a, b"}) == ("a", "b")
    assert api_keys_of(["c"], {"MINISGL_API_KEY": "a"}) == ("c",)
    assert api_keys_of(None, {}) == ()


def test_keys_are_shown_in_no_message() -> None:
    arguments = parse_arguments(["--admin-key", "most-secret", "--api-key", "secret-too"])
    assert arguments.endpoint is not None
    assert (arguments.server.admin_key, arguments.endpoint.api_keys) == ("most-secret", ("secret-too",))
    assert "secret" not in repr(arguments)


def test_every_engine_option_has_its_flags() -> None:
    for option in OPTIONS.values():
        for flag in option.flags:
            if option.allowed in ("any text", "a folder"):
                found = parse_arguments([flag, "?"]).engine_parameters
                assert found == {option.name: str(Path("?").absolute()) if option.allowed == "a folder" else "?"}
                continue
            if option.allowed == "a folder":
                assert parse_arguments([flag, "?"]).engine_parameters == {option.name: str(Path("?").absolute())}
                continue
            with pytest.raises(ConfigError, match=option.name):
                parse_arguments([flag, ""] if option.name == "model" else [flag, "?"])
            if option.name == "model":
                break


def test_engine_options_and_server_arguments() -> None:
    arguments = parse_arguments(["--attn", "torch", "--page-size", "16", "--dummy-weights", "--", "--log-verbose=1"])
    assert arguments.engine_parameters == {"attention_backend": "torch", "page_size": "16", "dummy_weights": "true"}
    assert arguments.server.arguments == ("--log-verbose=1",)


def test_user_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--page-size", "3"]) == 2
    assert capsys.readouterr().err == "[serve] error: page_size is '3'; allowed: a power of two\n".replace("'3'", "3")


def test_the_model_may_stand_alone() -> None:
    assert parse_arguments(["Qwen/Qwen3-0.6B", "--http-port", "80"]).engine_parameters == {"model": "Qwen/Qwen3-0.6B"}
    for arguments in (["demo", "--model", "demo"], ["--port", "80"]):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)


def test_no_health_endpoint_and_no_limit() -> None:
    arguments = parse_arguments(["--health-port", "0", "--start-timeout", "0"])
    assert (arguments.server.health_port, arguments.server.start_timeout) == (0, 0)


def test_a_model_folder_with_letters_beyond_ascii_is_served_by_links(tmp_path: Path) -> None:
    (tmp_path / "mödel").mkdir()
    (tmp_path / "mödel" / "config.json").write_text("{}")
    arguments = parse_arguments(["--model", str(tmp_path / "mödel")])
    links = Path(arguments.engine_parameters["model"])
    assert str(links.resolve()).isascii()
    assert (links / "config.json").read_text() == "{}"
    assert arguments.endpoint is not None
    assert arguments.endpoint.served_model_names == (str(tmp_path / "mödel"),)
    with pytest.raises(ConfigError, match="the model repository is in"):
        parse_arguments(["--repository", str(tmp_path / "mödel")])


def test_a_gguf_file_with_letters_beyond_ascii_is_served_by_links(tmp_path: Path) -> None:
    parts = [tmp_path / f"mödel-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_text(part.name)
    arguments = parse_arguments(["--model", str(parts[1])])
    link = Path(arguments.engine_parameters["model"])
    assert str(link).isascii()
    assert [(link.parent / f"model-0000{number}-of-00002.gguf").read_text() for number in (1, 2)] == [
        part.name for part in parts
    ]
    assert arguments.endpoint is not None
    assert arguments.endpoint.served_model_names == ("mödel",)


@pytest.mark.parametrize("name", ["\udcd0\udcbc", ""])
def test_a_model_name_that_is_no_unicode_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name is"):
        parse_arguments(["--served-model-name", name])


@pytest.mark.parametrize("names", [["--served-model-name", "one", "sql"], ["--model", "sql"]])
def test_an_adapter_with_the_models_name_could_not_be_asked_for(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="adapters names 'sql', which is the model's own name"):
        parse_arguments([*names, "--adapters", "a=/a,sql=/b"])


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_hosts_are_written_as_each_door_wants_them(host: str) -> None:
    settings = parse_arguments(["--host", host]).server
    install = TritonInstall(Path("/bin/true"), None, (), Path("/bin"))
    arguments = server_arguments(settings, install, "key")
    assert {"--http-address=ipv6:::1", "--metrics-address=ipv6:::1", "--grpc-address=[::1]"} <= {*arguments}
    assert settings.address == "[::1]:8000"


class _Crashing(Supervisor):
    """A supervisor whose servers end in an order that is known."""

    def __init__(self, ends: list[tuple[str | None, bool]]) -> None:
        super().__init__(parse_arguments([]), parse_arguments([]).server, None)  # type: ignore[arg-type]
        self.ends = ends

    def _serve_once(self) -> tuple[float | None, str | None]:
        problem, self._crashed = self.ends.pop(0)
        return None, problem


@pytest.mark.parametrize(
    ("ends", "left"),
    [
        ([(None, True), (None, True), (None, True)], 1),  # crashed before it was ready: once more, and no more
        ([(None, False), (None, True)], 1),  # ended by itself
        ([("the model is refused", True), (None, True)], 1),
    ],
)
def test_a_server_that_crashes_before_it_is_ready_is_tried_once_more(ends: list[Any], left: int) -> None:
    supervisor = _Crashing(ends)
    assert supervisor._keep_running() == 1
    assert len(supervisor.ends) == left


def test_options_are_answered_without_any_package() -> None:
    """As scripts/serve.sh asks on a fresh clone; -S hides what is installed."""

    def ask(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-S", "-m", "minisgl_backend.host.options.server", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return done.returncode, done.stdout + done.stderr

    code, text = ask("--help")
    assert code == 3
    assert "--max-running-requests" in text
    assert ask("--version") == (3, f"minisgl-backend {minisgl_backend.__version__}\n")
    assert ask("--page-size", "3") == (2, "[serve] error: page_size is 3; allowed: a power of two\n")
    code, text = ask("--typo")
    assert code == 2
    assert "--typo" in text
    assert ask("--page-size", "16") == (0, "")


def fake_triton(folder: Path, help_text: str) -> TritonInstall:
    binary = folder / "tritonserver"
    binary.write_text(f"#!/bin/sh\ncat <<'END'\n{help_text}\nEND\n")
    binary.chmod(0o755)
    return TritonInstall(binary, None, (), Path(sys.executable).parent)


def test_what_administers_the_server_needs_a_secret(tmp_path: Path) -> None:
    http, grpc = "--http-restricted-api", "--grpc-restricted-protocol"
    install = fake_triton(tmp_path, "Usage: tritonserver [options]")

    def restricted(*arguments: str) -> dict[str, set[str]]:
        command = server_arguments(parse_arguments(arguments).server, install, "secret")
        found = [item.split("=", 1) for item in command if item.endswith(":minisgl-control=secret")]
        return {option: set(value.split(":")[0].split(",")) for option, value in found}

    everything = set(ADMIN_APIS)
    assert restricted() == {http: everything, grpc: everything}
    less = everything - {"shared-memory", "trace"}
    assert restricted("--allow", "shared-memory,trace") == {http: less, grpc: less}
    assert restricted("--allow", ",".join(ADMIN_APIS)) == {}
    # What the user restricts with a key of his own must not stand there twice: tritonserver refuses that.
    mine = restricted("--", f"{http}=logging,trace:admin=x", grpc, "trace:admin=x")
    assert mine == {http: everything - {"logging", "trace"}, grpc: everything - {"trace"}}
    with pytest.raises(SystemExit):
        parse_arguments(["--allow", "everything"])


def test_a_newer_server_is_told_how_much_a_body_may_hold(tmp_path: Path) -> None:
    settings = parse_arguments([]).server
    for version, options in (
        ("old", "--http-port"),
        ("new", "--http-port <integer>\n  --http-max-input-size <integer>"),
    ):
        (tmp_path / version).mkdir()
        command = server_arguments(settings, fake_triton(tmp_path / version, f"  {options}"), "secret")
        assert ("--http-max-input-size=16777216" in command) == (version == "new")


def test_taken_and_equal_ports_are_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problem = free_port_error("127.0.0.1", [("--http-port", port)])
        assert problem is not None
        assert f"--http-port is {port}" in problem
    problem = free_port_error("127.0.0.1", [("--http-port", 5), ("--grpc-port", 5)])
    assert problem is not None
    assert "--grpc-port" in problem or "--http-port" in problem


def test_all_taken_ports_are_named_at_once() -> None:
    with contextlib.ExitStack() as stack:
        ports = []
        for option in ("--http-port", "--grpc-port", "--openai-port"):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports.append((option, taken.getsockname()[1]))
        problem = free_port_error("127.0.0.1", ports)
    (_, http), (_, grpc), (_, openai) = ports
    assert problem == (
        f"--http-port is {http}, --grpc-port is {grpc} and --openai-port is {openai}, which cannot be had on 127.0.0.1 "
        "(address already in use); choose other ports"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_no_fault_of_a_port(host: str) -> None:
    problem = free_port_error(host, [("--http-port", 8000)])
    assert problem is not None
    assert problem.startswith(f"--host is {host!r} (")
    assert problem.endswith("allowed: an address of this machine, 0.0.0.0 for all")


def test_health_tells_the_reason() -> None:
    reasons: list[str | None] = ["starting"]
    health = HealthServer("127.0.0.1", 0, lambda: reasons[0])
    url = f"http://127.0.0.1:{health.port}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with pytest.raises(urllib.error.HTTPError) as error:
            opener.open(f"{url}/ready", timeout=10)
        with error.value as reply:
            assert (reply.code, json.load(reply)) == (503, {"ready": False, "reason": "starting"})
        reasons[0] = None
        with opener.open(f"{url}/ready", timeout=10) as reply:
            assert (reply.status, json.load(reply)) == (200, {"ready": True, "reason": ""})
        with opener.open(f"{url}/live", timeout=10) as reply:
            assert reply.status == 200
        with pytest.raises(urllib.error.HTTPError) as error:
            opener.open(f"{url}/other", timeout=10)
        error.value.close()
        assert error.value.code == 404
    finally:
        health.close()


ROOT = Path(__file__).parents[3]

# A stand-in for tritonserver: starts one "stub" with the arguments that the real one gives it, and never collects it.
FAKE_SERVER = """
import os, subprocess, sys, tempfile, time
print(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"), flush=True)
stub = subprocess.Popen([*sys.argv[1:3], "no_such_region", "1", "1", str(os.getpid())], executable=sys.executable)
print(stub.pid, flush=True)
time.sleep(600)
"""


def fake_server(folder: Path, model: str) -> list[str]:
    """The command that starts one whose stub serves `model`."""
    file = folder / "repository" / model / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("import time\ntime.sleep(600)\n")
    return [sys.executable, "-c", FAKE_SERVER, "triton_python_backend_stub", str(file)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_without_file_descriptors_the_health_endpoint_waits_before_it_accepts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection that cannot be taken keeps the listener readable."""
    attempts: list[float] = []

    def no_descriptor(server: ThreadingHTTPServer) -> None:
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    health = HealthServer("127.0.0.1", 0, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadingHTTPServer, "get_request", no_descriptor)
        connection = socket.create_connection(("127.0.0.1", health.port), timeout=10)
        time.sleep(0.35)
    assert 1 <= len(attempts) <= 10
    connection.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
    assert b"200" in connection.recv(100)
    connection.close()
    health.close()


def test_a_health_endpoint_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(ConfigError, match=r"--health-port is \d+, which cannot be had on 127.0.0.1: ")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        HealthServer("127.0.0.1", taken.getsockname()[1], lambda: None)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ConfigError, match="--health-port is 0, which cannot be served: can't start new thread"):
        HealthServer("127.0.0.1", 0, lambda: None)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_dead_stub_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    with subprocess.Popen(fake_server(tmp_path, "tokenizer"), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            folder = Path(server.stdout.readline().strip())
            stub_pid = int(server.stdout.readline())
            processes = ServerProcesses(server.pid)
            assert processes.scan() == set()
            assert stub_pid in [process.pid for process in descendants(server.pid, process_table())]
            os.kill(stub_pid, 9)
            wait_for_zombie(stub_pid)
            assert processes.dead_now() == {"tokenizer"}
            assert processes.scan() == set(), "dead at one scan only: may be on its way out as it should"
            assert processes.scan() == {"tokenizer"}
            processes.kill_stubs("tokenizer")
            assert processes.scan() == set()
            assert processes.dead_now() == set()
        finally:
            server.kill()
        server.wait()
        made = folder.stat().st_mtime
        others = [other for other in Path("/tmp").glob("python_env_*") if abs(other.stat().st_mtime - made) < 5]
        processes.kill_all()
        if others == [folder]:  # else nobody can tell whose they are
            assert not folder.exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("session", [True, False])
def test_a_stub_that_started_just_before_the_server_died_is_ended(tmp_path: Path, session: bool) -> None:
    """Nobody had seen it, and it is no longer the server's child: a server that dies of a reload leaves such a one."""
    with subprocess.Popen(
        fake_server(tmp_path, "detokenizer"), stdout=subprocess.PIPE, text=True, start_new_session=session
    ) as server:
        processes = ServerProcesses(server.pid)
        assert server.stdout is not None
        Path(server.stdout.readline().strip()).rmdir()
        stub_pid = int(server.stdout.readline())
        server.kill()
        server.wait()
    assert not process_table()[stub_pid].dead
    processes.kill_all()
    stub = process_table().get(stub_pid)
    assert stub is None or stub.dead


def wait_for_zombie(pid: int) -> None:
    deadline = time.monotonic() + 30
    while not process_table()[pid].dead and time.monotonic() < deadline:
        time.sleep(0.01)
