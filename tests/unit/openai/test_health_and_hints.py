"""/health tells whether requests are answered, and errors name fields of the path that was asked."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import free_ports
from tests.unit.openai.scripted_app import ScriptedApp, scripted_app


@pytest.fixture
def metrics() -> Iterator[tuple[str, list[str]]]:
    """The address of a server's metrics, and their text."""
    told = [""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told[0].encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}", told
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_engine_is_down_where_metrics_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: tuple[str, list[str]]
) -> None:
    address, told = metrics
    monkeypatch.setattr("minisgl_backend.openai.metrics._FRESH_SECONDS", 0.0)
    with scripted_app(tmp_path, monkeypatch, metrics_address=address) as app:
        for text, status in (('engine_up{model="x"} 0', 503), ('engine_up{model="x"} 1', 200), ("other 0", 200)):
            told[0] = f"# x\nminisgl_{text}\n"
            found, answer = app.ask("GET", "/health")
            assert (found, answer["ready"]) == (status, status == 200)


def test_a_server_whose_metrics_are_elsewhere_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with scripted_app(tmp_path, monkeypatch, metrics_address=address) as app:
        for _ in range(2):
            assert app.ask("GET", "/health") == (200, {"ready": True, "reason": ""})
        assert app.ask("POST", "/v1/completions", {"prompt": "x"})[0] == 200
    told = [record.getMessage() for record in caplog.records if "/health" in record.getMessage()]
    assert told == [f"/health cannot tell if the engine is down: no metrics at {address} (--metrics)"]


def test_hints_are_of_the_path_that_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(app: ScriptedApp, path: str, **body: object) -> str:
        status, answer = app.ask("POST", path, body)
        assert status == 400
        return str(answer["error"]["message"])

    with scripted_app(tmp_path, monkeypatch) as app:
        said = refused(app, "/v1/completions", prompt="x", max_completion_tokens=5)
        assert said == "max_completion_tokens is unknown; allowed: max_tokens"
        assert refused(app, "/v1/responses", input="x", max_tokens=5).endswith("; allowed: max_output_tokens")
        messages = [{"role": "user", "content": "x"}]
        said = refused(app, "/v1/messages", max_tokens=5, messages=messages, output_config={"odd": 1})
        assert said.startswith("output_config.odd is unknown")
        assert "output" not in refused(app, "/v1/embeddings", input="x", max_tokens=5)


def test_what_is_said_in_two_shapes_is_named_in_the_clients_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with scripted_app(tmp_path, monkeypatch) as app:
        for path, body, told in (
            ("/v1/messages", {**messages, "stop": ["x"]}, "stop is given; allowed: stop_sequences"),
            ("/rerank", {"query": "x", "texts": ["a"], "documents": ["a"]}, "texts is given together with documents; "),
        ):
            status, answer = app.ask("POST", path, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert answer["error"]["message"].startswith(told)
