"""The command `minisgl`, run in-process against the fake server."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import WORDS, Record
from typer.testing import CliRunner

import minisgl_backend
from client import Client, Unavailable, cli
from client.cli import app
from client.console import write_answer
from client.metrics import parse_metrics
from client.results import Choice, Result
from client.status import status_lines
from minisgl_backend.parsers.table import REASONING_PARSERS, TOOL_PARSERS

FULL_TEXT = "".join(WORDS)
WAIT = 20.0  # seconds; generous, nothing here measures time


def run(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=text)


def test_generate_streams_the_answer(url: str, record: Record) -> None:
    done = run("generate", "Hallo", "--url", url, "--max-tokens", "7", "--stop", "a", "--stop", "b", "--raw")
    assert (done.exit_code, done.stdout) == (0, FULL_TEXT + "\n")
    sent = record.requests[0]
    assert (sent["stream"], sent["max_tokens"], sent["stop_words"]) == ([True], [7], ["a", "b"])
    assert sent["apply_chat_template"] == [False]


def test_generate_from_the_standard_input_with_a_system_prompt(url: str, record: Record) -> None:
    done = run("generate", "-", "--url", url, "--system", "Be brief.", "--no-stream", text="Hallo")
    assert done.stdout == FULL_TEXT + "\n"
    messages = json.loads(record.requests[0]["messages"][0])
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hallo"}]
    assert record.requests[0]["stream"] == [False]


def test_generate_sends_a_message_or_a_text_where_there_is_no_template(url: str, record: Record) -> None:
    assert run("generate", "Hallo", "--url", url).stdout == FULL_TEXT + "\n"
    assert json.loads(record.requests[-1]["messages"][0]) == [{"role": "user", "content": "Hallo"}]
    assert record.requests[-1]["max_tokens"] == [1024]
    for more in ((), ("--no-stream",), ("--json",)):
        assert FULL_TEXT in run("generate", "base model", "--url", url, *more).stdout
        assert (record.requests[-1]["text_input"], record.requests[-1]["apply_chat_template"]) == (
            ["base model"],
            [False],
        )
        assert "messages" not in record.requests[-1]
    assert run("generate", "base model", "--url", url, "--chat").exit_code == 1


def test_generate_sends_images_before_the_text(url: str, record: Record, tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        file.write_bytes(file.name.encode())
    given = ["--image", str(files[0]), "--image", str(files[1])]
    run("generate", "What?", "--url", url, *given)
    (message,) = json.loads(record.requests[-1]["messages"][0])
    first, second, text = message["content"]
    assert first == {"type": "image_url", "image_url": {"url": "data:;base64,YS5wbmc="}}
    assert (second["image_url"]["url"], text) == ("data:;base64,Yi5wbmc=", {"type": "text", "text": "What?"})
    run("generate", "What?", "--url", url, "--raw", *given)
    assert record.requests[-1]["image"] == ["YS5wbmc=", "Yi5wbmc="]
    absent = run("generate", "What?", "--url", url, "--image", "/no/file")
    assert (absent.exit_code, "images[0] cannot be read" in absent.stderr) == (1, True)


def test_generate_has_a_word_for_an_answer_without_one(url: str) -> None:
    done = run("generate", "nothing", "--url", url)
    assert (done.stdout, "the model ended at once" in done.stderr) == ("\n", True)


def test_generate_json_and_several_answers(url: str) -> None:
    result = json.loads(run("generate", "Hallo", "--url", url, "--json").stdout)
    assert result["choices"][0]["text"] == FULL_TEXT
    several = run("generate", "Hallo", "--url", url, "--n", "2").stdout
    assert several.count(FULL_TEXT) == 2


def test_generate_leaves_the_number_of_answers_to_the_server(url: str, record: Record) -> None:
    run("generate", "Hallo", "--url", url, "--n", "0")
    assert record.requests[0]["num_return_sequences"] == [0]


@pytest.mark.parametrize(
    ("arguments", "exit_status", "message"),
    [
        (("invalid",), 1, "InvalidRequest: top_p is 7"),
        (("Hallo", "--system", "x", "--raw"), 2, "--system is given with --raw; allowed: one of them"),
        (("Hallo", "--protocol", "smtp"), 2, "protocol is 'smtp'; allowed: grpc, http"),
        (("Hallo", "--url", "grpc://127.0.0.1:1"), 1, "Unavailable:"),
        (("Hallo", "--url", "ftp://x"), 2, "allowed schemes"),
        (("Hallo", "--url", "host:port"), 2, "HOST:PORT"),
        (("Hallo", "--url", "http://x/v2"), 2, "HOST:PORT"),
        (("Hallo", "--url", "http://x", "--protocol", "grpc"), 2, "leave one of them out"),
    ],
)
def test_errors_take_one_line(grpc_url: str, arguments: tuple[str, ...], exit_status: int, message: str) -> None:
    given = arguments if "--url" in arguments or "--protocol" in arguments else (*arguments, "--url", grpc_url)
    done = run("generate", *given)
    assert done.exit_code == exit_status
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_chat_keeps_and_forgets_the_history(url: str, record: Record) -> None:
    lines = ["one", "two", "/reset", "", "three", "/system Be kind.", "four", "/what", "/exit", "five"]
    done = run("chat", "--url", url, text="\n".join(lines) + "\n")
    assert done.exit_code == 0
    sent = [[message["content"] for message in json.loads(request["messages"][0])] for request in record.requests]
    assert sent == [["one"], ["one", FULL_TEXT, "two"], ["three"], ["Be kind.", "four"]]


def test_chat_notices_at_once_that_there_is_no_server() -> None:
    done = run("chat", "--url", "127.0.0.1:1", text="Hallo\n")
    assert done.exit_code == 1
    assert "Unavailable: cannot connect to 127.0.0.1:1; is the server running (minisgl serve)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_chat_gives_the_hint_when_the_server_has_gone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise Unavailable("failed to connect to all addresses")

    monkeypatch.setattr(Client, "stream", gone)
    done = run("chat", "--url", url, text="Hallo\n")
    assert done.exit_code == 1
    assert "is the server running (minisgl serve)" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["generate"], "default: the model's own"),
        (["chat"], "default: ensemble, with --openai the server's first"),
        (["bench"], "default: 1,8,32"),
        (["bench", "compare"], "the first is the basis"),
        (["openai"], "default: port 8002 of the same host"),
        (["status"], "else http://HOST:8002/metrics"),
    ],
)
def test_help_is_whole(command: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets in it would be markup to rich, and what is in them would be lost."""
    monkeypatch.setenv("COLUMNS", "300")
    done = run(*command, "--help")
    assert done.exit_code == 0, done.exception
    assert words in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_does_not_steer_the_terminal(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "a\x1b[2J\tb\x9b31m\x07\n"
    result = Result("id", (Choice(written, "stop", 0, 1),), 1, 1)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        cli._print_result(result, as_json)
        shown = stream.getvalue()
        assert ("\x9b" in shown) is not stream.isatty()
        assert as_json or ("\x1b" in shown) is not stream.isatty()
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    write_answer(written)
    assert stream.getvalue() == "a[2J\tb31m\n"


def test_the_version() -> None:
    assert run("--version").stdout == f"minisgl-backend {minisgl_backend.__version__}\n"


def test_chat_goes_on_after_an_error(url: str, record: Record) -> None:
    done = run("chat", "--url", url, text="invalid\nHallo\n")
    assert done.exit_code == 1  # a script's; at a terminal people have seen the error
    assert "top_p is 7" in done.stderr
    assert [len(json.loads(request["messages"][0])) for request in record.requests] == [1, 1]


def run_process(*arguments: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "client", *arguments]
    return subprocess.run(command, input=given, capture_output=True, timeout=3 * WAIT, env=environment, check=False)


def test_generate_refuses_bytes_that_are_no_text(url: str, record: Record) -> None:
    done = run_process("generate", "-", "--url", url, given=b"a\xff")
    assert done.stderr.decode() == "error: InvalidRequest: messages holds a lone surrogate; allowed: Unicode text\n"
    assert done.returncode == 1
    assert not record.requests


def test_chat_goes_on_after_bytes_that_are_no_text(url: str, record: Record) -> None:
    done = run_process("chat", "--url", url, given=b"a\xff\n/save \xff/x\nHallo\n")
    assert done.stdout.decode().endswith(f"{FULL_TEXT}\n")
    assert "InvalidRequest: messages holds a lone surrogate; allowed: Unicode text" in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert [len(json.loads(request["messages"][0])) for request in record.requests] == [1]


def test_a_standard_input_that_cannot_be_read_takes_one_line(url: str) -> None:
    done = CliRunner().invoke(app, ["generate", "-", "--url", url], input=b"\xff")
    assert done.exit_code == 2
    assert "can't decode byte 0xff" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_ctrl_c_stops_the_answer(url: str, record: Record, command: str) -> None:
    arguments = ["generate", "forever"] if command == "generate" else ["chat"]
    process = subprocess.Popen(
        [sys.executable, "-m", "client", *arguments, "--url", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if command == "chat":
            process.stdin.write("forever\n")
            process.stdin.flush()
        seen = ""
        while "3 " not in seen:
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert record.cancelled.wait(WAIT)
        rest, errors = process.communicate("/exit\n" if command == "chat" else None, timeout=WAIT)
        assert process.returncode == (0 if command == "chat" else 130), errors
        assert "Traceback" not in errors
        if command == "chat":
            assert "(stopped)" in rest
    finally:
        process.kill()
        process.wait()


def test_status(url: str, http_url: str) -> None:
    done = run("status", "--url", url, "--metrics-url", f"{http_url}/metrics")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "server: live; ensemble: ready; smollm2 on minisgl 0.1.0",
        f"engine: up, for {done.stdout.partition('for ')[2].partition(',')[0]}, context of 8,192 tokens, 0 restarts",
        "requests: 2 running, 1 waiting, 7 finished, 3 cancelled, 0 failed",
        "averages: first token after 0.50 s, then 4.0 tokens/s a sequence, 1,224 tokens generated",
        "cache: 5 of 2,911 pages in use, 19 kept, 75% of 400 prompt tokens came from it, 0 preemptions",
    ]
    done = run("status", "--all", "--url", url, "--metrics-url", f"{http_url}/metrics")
    assert done.stdout.startswith("server: live; ensemble: ready\n")
    assert "minisgl_pages_leased" in done.stdout
    assert run("status", "--url", url, "--model", "other", "--metrics-url", f"{http_url}/metrics").exit_code == 1
    assert run("status", "--url", "127.0.0.1:1").exit_code == 1


@pytest.mark.parametrize(
    ("seconds", "said"), [(-3, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7200, "2 h 0 min"), (200000, "2 d 7 h")]
)
def test_status_tells_what_a_server_has_and_no_more(seconds: float, said: str) -> None:
    """An older or idle server has fewer figures."""
    assert list(status_lines(parse_metrics(""), "first", 0.0)) == [
        "first",
        "engine: down, 0 restarts",
        "requests: 0 running, 0 waiting, 0 finished, 0 cancelled, 0 failed",
        "averages: 0 tokens generated",
        "cache: no prompt yet, 0 preemptions",
    ]
    page = parse_metrics("minisgl_engine_up 1\nminisgl_start_time_seconds 1000000\n")
    assert list(status_lines(page, "first", 1000000 + seconds))[1] == f"engine: up, for {said}, 0 restarts"


def test_status_of_a_server_without_metrics(url: str) -> None:
    closed = "http://127.0.0.1:1/metrics"
    done = run("status", "--url", url, "--metrics-url", closed)
    assert (done.exit_code, done.stdout) == (0, "server: live; ensemble: ready\n")
    assert done.stderr.startswith(f"no metrics from {closed}: ")
    assert done.stderr.count("\n") == 1
    assert run("status", "--url", url, "--model", "other", "--metrics-url", closed).exit_code == 1


def test_the_command_starts_where_posix_modules_are_missing(http_url: str) -> None:
    """As on Windows, where people talk to a server that runs elsewhere."""
    absent = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from client.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "Hallo", "--url", http_url]
    done = subprocess.run(command, capture_output=True, timeout=3 * WAIT, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, FULL_TEXT + "\n", b"")


def test_help_names_every_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = run("openai", "--help").stdout
    assert all(name in shown for name in (*TOOL_PARSERS, *REASONING_PARSERS))


@pytest.mark.parametrize(
    ("shell", "words", "offered"),
    [
        ("bash", "minisgl serve --max-", "--max-running-requests"),
        ("bash", "minisgl se", "serve"),
        ("zsh", "minisgl init --ou", "--out"),
        ("fish", "minisgl check --page", "--page-size"),
        ("fish", "minisgl generate --temp", "--temperature"),
    ],
)
def test_shells_complete(shell: str, words: str, offered: str) -> None:
    variables = {
        "_MINISGL_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    program = "import sys; sys.argv[0] = 'minisgl'; from client.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert offered in done.stdout.replace('"', " ").split(), done


def test_the_server_may_be_named_by_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_URL", url)
    assert run("generate", "Hallo").stdout == FULL_TEXT + "\n"
    monkeypatch.setenv("MINISGL_METRICS_URL", "http://127.0.0.1:1/metrics")
    with Client() as connected, pytest.raises(Unavailable, match=r"no metrics from http://127\.0\.0\.1:1/metrics"):
        connected.metrics()
    monkeypatch.setenv("MINISGL_URL", "ftp://host")
    done = run("generate", "Hallo")
    assert (done.exit_code, done.stderr[:60]) == (
        2,
        "error: MINISGL_URL is 'ftp://host'; allowed schemes: grpc, g"[:60],
    )
