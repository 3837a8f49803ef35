"""The endpoint's process with no server behind it: what it answers by itself."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.served import free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import openai_endpoint
from minisgl_backend.host.openai_endpoint import OpenAIEndpoint
from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.host.options.server import parse_arguments

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[OpenAIEndpoint]:
    port, nobody = free_ports(2)
    found = OpenAIEndpoint(
        EndpointSettings(
            port=port,
            grpc_address=f"127.0.0.1:{nobody}",
            metrics_address=f"127.0.0.1:{nobody}",
            served_model_names=("one",),
            max_body_bytes=2000,
        )
    )
    yield found
    found.stop()


def ask(endpoint: OpenAIEndpoint, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, body, headers) of a GET, or of a POST where there is a body."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}{path}", data, head)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_SECONDS) as reply:
            return reply.status, reply.read().decode(), {k.lower(): v for k, v in reply.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), {k.lower(): v for k, v in error.headers.items()}


def test_a_server_that_is_away_is_503(endpoint: OpenAIEndpoint) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/responses", {"input": "hello", "stream": True}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/models", None),
    ):
        status, answer, headers = ask(endpoint, path, body, **{"X-Request-Id": "mine"})
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "server_error", "unavailable")
        assert headers["x-request-id"] == "mine"
    status, answer, _ = ask(endpoint, "/metrics")
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    status, answer, _ = ask(endpoint, "/health")
    assert (status, answer["ready"]) == (503, False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"messages": [], "model": "one"}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "two"}, 404, "model"),
        ("/v1/chat/completions", b"{", 400, "body"),
        ("/v1/completions", {"prompt": "\ud800", "model": "one"}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "stop": "\ud800"}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "\ud800": 1}, 400, "body"),
        ("/v1/completions", {"prompt": [2**40]}, 400, "prompt"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens"),
        ("/v1/completions", {"prompt": "x" * 3000}, 413, None),
        ("/v1/nowhere", {}, 404, None),
    ],
)
def test_what_is_wrong_is_told_without_a_server(
    endpoint: OpenAIEndpoint, path: str, body: Any, status: int, param: str | None
) -> None:
    found, answer, _ = ask(endpoint, path, body)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_body_of_another_content_type_is_told_which_one(endpoint: OpenAIEndpoint) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends unless told otherwise
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        status, answer, _ = ask(endpoint, path, {"messages": [], "prompt": "x"}, **form)
        message = "the body has another content type; allowed: Content-Type: application/json"
        assert (status, answer["error"]["message"]) == (400, message)
    for body in (b"[]", b"3", b"{"):
        status, answer, _ = ask(endpoint, "/v1/chat/completions", body)
        assert (status, answer["error"]["message"][:26]) == (400, "the body is no JSON object")


def test_the_page_and_the_description(endpoint: OpenAIEndpoint) -> None:
    status, page, headers = ask(endpoint, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.rstrip().endswith("</html>")
    assert "script-src 'self'" in headers["content-security-policy"]
    status, _, script = ask(endpoint, "/page/chat.js")
    assert (status, script["content-security-policy"]) == (200, headers["content-security-policy"])
    assert "javascript" in script["content-type"]
    assert ask(endpoint, "/page/../../app.py")[0] == ask(endpoint, "/page/nothing.js")[0] == 404
    assert "/v1/chat/completions" in json.loads(ask(endpoint, "/openapi.json")[1])["paths"]
    assert set(json.loads(ask(endpoint, "/version")[1])) == {"version"}


def test_browsers_let_no_other_pages_in(endpoint: OpenAIEndpoint) -> None:
    """CORS is off where no origins are named."""
    for path, body in (("/version", None), ("/v1/completions", {"prompt": "x"})):
        headers = ask(endpoint, path, body, Origin="https://app.example")[2]
        assert not [name for name in headers if name.startswith("access-control")]


def test_a_process_that_dies_is_replaced_and_the_port_stays_open(endpoint: OpenAIEndpoint) -> None:
    assert ask(endpoint, "/version")[0] == 200
    (dead,) = endpoint.process_ids
    os.kill(dead, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while endpoint.process_ids in ([], [dead]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ask(endpoint, "/version")[0] == 200


def test_a_process_that_cannot_be_started_is_tried_again_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    starts = 0

    def start(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        nonlocal starts
        starts += 1
        if starts in (2, 3):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    monkeypatch.setattr(openai_endpoint, "start_child", start)
    monkeypatch.setattr(openai_endpoint, "_BACKOFF_SECONDS", (0.0,))
    (port,) = free_ports(1)
    endpoint = OpenAIEndpoint(EndpointSettings(port=port, workers=2), said.append)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(endpoint.process_ids) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    endpoint.stop()
    assert len([line for line in said if "cannot be started" in line]) == 2


def test_a_process_that_starts_while_all_stop_still_has_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, had_socket = threading.Event(), []

    def start(*_: Any, fds: tuple[int, ...], **__: Any) -> subprocess.Popen[bytes]:
        starting.set()
        time.sleep(0.3)
        with contextlib.suppress(OSError):
            had_socket.append(stat.S_ISSOCK(os.fstat(fds[0]).st_mode))
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    monkeypatch.setattr(openai_endpoint, "start_child", start)
    (port,) = free_ports(1)
    endpoint = OpenAIEndpoint(EndpointSettings(port=port))
    assert starting.wait(PATIENCE_SECONDS)
    endpoint.stop()
    assert had_socket == [True]


def test_a_taken_port_is_named(endpoint: OpenAIEndpoint) -> None:
    with pytest.raises(ConfigError, match=f"--openai-port is {endpoint.port}"):
        OpenAIEndpoint(EndpointSettings(port=endpoint.port))


def test_a_folder_that_cannot_be_made_is_told_and_nothing_else_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    said: list[str] = []
    settings = EndpointSettings(port=free_ports(1)[0], served_model_names=("one",), files_folder=f"{tmp_path}/file/x")
    endpoint = OpenAIEndpoint(settings, said.append)
    try:
        assert said == [
            f"no files and no batches: {tmp_path}/file/x cannot be written; --files-dir names another folder"
        ]
        assert ask(endpoint, "/v1/files")[0] == 404
        assert ask(endpoint, "/version")[0] == 200
    finally:
        endpoint.stop()


@pytest.mark.parametrize("folder", ["/proc/x", "{tmp}/file/x", "{tmp}/file", "{tmp}/dangling", "{tmp}/part"])
def test_a_folder_of_files_that_was_given_must_be_writable(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("/proc/x")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "batches").write_text("x")
    folder = folder.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match=r"--files-dir is '.*', which cannot be written: "):
        parse_arguments(["--files-dir", folder])
    assert parse_arguments(["--files-dir", folder, "--max-files-bytes", "0"]).endpoint is not None, "there are no files"
    monkeypatch.setattr("minisgl_backend.host.options.endpoint.default_files_folder", lambda port: folder)
    assert parse_arguments([]).endpoint is not None, "a default that is no use is told later"


def test_a_folder_of_files_may_be_full_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = parse_arguments(["--files-dir", f"{tmp_path}/a/b"]).endpoint
    assert endpoint is not None
    assert endpoint.files_folder == f"{tmp_path}/a/b"
    assert os.listdir(tmp_path) == []

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("minisgl_backend.process.writable.tempfile.mkdtemp", full)
    assert parse_arguments(["--files-dir", f"{tmp_path}/a/b"]).endpoint == endpoint, "there may be space later"


def test_the_endpoint_alone_refuses_such_a_folder_too() -> None:
    command = [sys.executable, "-m", "client", "openai", "--files-dir", "/proc/x", "--port", str(free_ports(1)[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2
    assert "--files-dir is '/proc/x', which cannot be written: " in done.stderr
