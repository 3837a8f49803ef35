"""`minisgl chat` in a pipe and in a pseudo-terminal, against stand-ins for servers."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import PIECES, TOKENS_PER_PIECE, Script
from fake_server import WORDS, Record
from rich.console import Console
from typer.testing import CliRunner

from client import Client
from client.chat.command import describe
from client.chat.conversation import Chat
from client.chat.screen import MarkdownScreen, last_block
from client.cli import app

pexpect = pytest.importorskip("pexpect")

WAIT = 20.0  # seconds; generous, nothing here measures time
TEXT = "".join(WORDS)


def run(*arguments: str, text: str) -> Any:
    return CliRunner().invoke(app, ["chat", *arguments], input=text)


def messages_of(record: Record) -> list[list[str]]:
    """The contents of each request's messages."""
    return [[message["content"] for message in json.loads(sent["messages"][0])] for sent in record.requests]


# --- the history


def chat_with(url: str, text: str = "forever", until: str = "") -> Chat:
    """A chat after one turn, which is left where the piece `until` comes."""
    with Client(url) as client:
        chat = Chat(lambda messages: client.stream(messages=messages))
        for chunk in (answer := chat.ask(text)):
            if chunk.text == until:
                answer.close()
    return chat


def test_a_stopped_answer_stays_in_the_history(url: str, record: Record) -> None:
    chat = chat_with(url, until="2 ")
    assert chat.messages[-1] == {"role": "assistant", "content": "0 1 2 "}
    assert record.cancelled.wait(WAIT)
    assert chat.turns[-1].stopped
    assert chat.turns[-1].num_output_tokens == 3
    assert "stopped" in describe(chat.turns)


def test_what_a_turn_costs(url: str) -> None:
    (turn,) = chat_with(url, "Hallo").turns
    assert (turn.num_input_tokens, turn.num_output_tokens, turn.finish_reason) == (4, len(WORDS), "stop")
    assert turn.first_token_s is not None
    assert turn.first_token_s <= turn.seconds
    assert f"4 tokens in, {len(WORDS)} out, finish reason stop" in describe([turn])
    assert describe([turn, turn]).endswith(f"8 tokens in, {2 * len(WORDS)} out")


def test_messages_are_saved_and_loaded(url: str, tmp_path: Path) -> None:
    chat = chat_with(url, "Hallo")
    chat.save(tmp_path / "chat.json")
    other = Chat(lambda messages: pytest.fail("nobody is asked"), "A system prompt that goes.")
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages == json.loads((tmp_path / "chat.json").read_text())
    (tmp_path / "system.json").write_text('[{"role": "system", "content": "Be kind."}]')
    other.load(tmp_path / "system.json")
    assert other.messages == [{"role": "system", "content": "Be kind."}]
    other.reset()
    assert other.messages == [{"role": "system", "content": "Be kind."}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "holds no messages"),
        ("{}", "allowed: a JSON list"),
        ("[1]", "message 0 is 1; allowed: an object"),
        ('[{"role": "user", "content": "x"}, {"role": "me", "content": "x"}]', "message 1: role is 'me'; allowed: sys"),
        ('[{"role": "user"}]', "message 0: content is None; allowed: a text"),
    ],
)
def test_a_file_without_messages_changes_nothing(url: str, tmp_path: Path, content: str, message: str) -> None:
    chat, before = chat_with(url, "Hallo"), chat_with(url, "Hallo").messages
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        chat.load(path)
    assert chat.messages == before
    with pytest.raises(ValueError, match="cannot be read"):
        chat.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="cannot be written"):
        chat.save(tmp_path / "absent" / "file")


# --- in a pipe


def test_commands_in_a_pipe(url: str, record: Record, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = ["/stats", "one", f"/save {file}", "/reset", "two", f"/load {file}", "three", "/load", "/nope", "/stats",
             "/system Be kind.", "four", "/help", "/quit", "five"]  # fmt: skip
    done = run("--url", url, text="\n".join(lines))
    assert done.exit_code == 0
    assert messages_of(record) == [["one"], ["two"], ["one", TEXT, "three"], ["Be kind.", "four"]]
    assert [message["content"] for message in json.loads(file.read_text())] == ["one", TEXT]
    assert "(no answer yet)" in done.stdout
    assert "(/nope is unknown; /help lists the commands)" in done.stdout
    assert "session, 3 answers: first token" in done.stdout
    assert "/load FILE" in done.stdout
    assert "error: /load needs the name of a file" in done.stderr
    assert "\x1b" not in done.stdout
    assert "> " not in done.stdout


def test_an_image_belongs_to_the_next_question(url: str, record: Record, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"hi")
    lines = [f"/image {tmp_path}/absent", f"/image {tmp_path}/a.png", f"/image {tmp_path}/a.png", "one", "two"]
    done = run("--url", url, text="\n".join(lines))
    assert "absent cannot be read" in done.stderr
    assert "(2 for the next question)" in done.stdout
    image = {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}
    first, second = messages_of(record)
    assert first == [[image, image, {"type": "text", "text": "one"}]]
    assert second == [*first, TEXT, "two"]


@pytest.mark.parametrize("command", ["/save", "/load"])
def test_the_folder_of_nobody_ends_no_chat(url: str, command: str) -> None:
    done = run("--url", url, text=f"{command} ~nosuch/x\nHallo\n")
    assert done.exit_code == 0
    assert "error: ~nosuch/x: Could not determine home directory" in done.stderr
    assert TEXT in done.stdout


def test_openai_servers(openai_url: str, script: Script) -> None:
    script.reasoning = "Hm."
    done = run("--openai", openai_url, "--api-key", "secret", "--temperature", "0.5", text="Hallo\n/stats\n")
    assert done.exit_code == 0
    assert done.stdout.startswith("".join(PIECES) + "\n")
    assert f"7 tokens in (3 cached), {TOKENS_PER_PIECE * len(PIECES)} out, finish reason stop" in done.stdout
    assert (script.requests[0]["temperature"], script.keys) == (0.5, ["Bearer secret"])
    assert script.requests[0]["path"] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("arguments", "exit_status", "message"),
    [
        (("--openai", "x:1", "--local", "demo"), 2, "--openai and --local are given; allowed: one server or model"),
        (("--openai", "x:1", "--url", "y:1"), 2, "--openai and --url are given"),
        (("--local", "demo", "--model", "x"), 2, "--local goes with neither --model nor --timeout"),
        (("--openai", "ftp://x"), 2, "allowed: http://HOST:PORT"),
        (("--openai", "127.0.0.1:1"), 1, "Unavailable: cannot connect to 127.0.0.1:1"),
        (("--local", "/no/such/model"), 1, "/no/such/model"),
    ],
)
def test_wrong_sources(arguments: tuple[str, ...], exit_status: int, message: str) -> None:
    done = run(*arguments, text="")
    assert done.exit_code == exit_status
    assert message in done.stderr


# --- Markdown


def test_the_last_block() -> None:
    assert last_block("One paragraph\nof two lines") == 0
    text = "# Title\n\nA paragraph.\n\n- a\n- b\n"
    assert text[last_block(text) :] == "- a\n- b\n"
    code = "Text\n\n```python\nx = 1\n\ny = 2\n"
    assert code[last_block(code) :].startswith("```python")


def rendered(text: str, height: int = 25) -> str:
    """What stands on a terminal in the end, piece by piece, without styles."""
    console = Console(force_terminal=True, width=60, height=height, color_system=None, record=True, file=io.StringIO())
    screen = MarkdownScreen(console)
    for start in range(0, len(text), 5):
        screen.write(text[start : start + 5])
    screen.end()
    return console.export_text()


def test_markdown_is_rendered_and_nothing_is_lost() -> None:
    shown = rendered("# Title\n\nSome **bold** `code`.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```\n")
    assert all(word in shown for word in ("Title", "Some bold code.", "x = 1"))
    assert "**" not in shown
    assert "```" not in shown
    assert "|---|" not in shown


def test_tags_and_control_characters_are_no_markup() -> None:
    shown = rendered("<think>Hm.</think>\n\nAn \x1b[31manswer\x1b]0;title\x07.\r\n")
    assert "<think>Hm.</think>" in shown
    assert "An [31manswer]0;title." in shown


def test_a_block_higher_than_the_terminal_is_whole_in_the_end() -> None:
    lines = "\n".join(f"- item {number}" for number in range(60))
    shown = rendered(lines, height=10)
    assert all(f"item {number}" in shown for number in range(60))


# --- in a terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Any]:
    """Starts `minisgl chat` in a pseudo-terminal; call it with the arguments."""
    started: list[Any] = []
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}

    def start(*arguments: str) -> Any:
        command = ["-m", "client", "chat", *arguments]
        child = pexpect.spawn(
            sys.executable, command, env=environment, timeout=WAIT, encoding="utf-8", dimensions=(24, 100)
        )
        started.append(child)
        child.expect("lists the commands")
        return child

    yield start
    for child in started:
        child.close(force=True)


def test_a_terminal_keeps_lines_and_completes_commands(url: str, record: Record, terminal: Any, tmp_path: Path) -> None:
    child = terminal("--url", url)
    child.sendline("Hallo")
    child.expect("Ende")
    child.expect("finish reason stop")
    child.send("/sta\t")
    child.expect("/stats")
    child.sendline()
    child.expect("session, 1 answer:")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    history = tmp_path / "minisgl" / "chat_history"
    assert history.read_text().splitlines() == ["Hallo", "/stats"]
    assert history.stat().st_mode & 0o077 == 0

    again = terminal("--url", url)
    again.send("\x1b[A\x1b[A")  # the arrow up, twice
    again.expect("Hallo")
    again.sendline(" again")
    again.expect("finish reason stop")
    assert messages_of(record)[-1] == ["Hallo again"]


def test_ctrl_c_in_a_terminal(url: str, record: Record, terminal: Any) -> None:
    child = terminal("--url", url)
    # At the prompt. Python's readline overlooks a signal that comes just before it begins to wait, until the next one.
    deadline = time.monotonic() + WAIT
    child.sendintr()
    while child.expect(["Ctrl-D leaves", pexpect.TIMEOUT], timeout=1.0) != 0:
        assert time.monotonic() < deadline
        child.sendintr()
    child.sendline("forever")
    child.expect("20 21")
    child.sendintr()
    child.expect("stopped")
    assert record.cancelled.wait(WAIT)
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_ctrl_c_leaves_an_openai_stream(openai_url: str, script: Script, terminal: Any) -> None:
    script.endless = True
    child = terminal("--openai", openai_url)
    child.sendline("Hallo")
    child.expect("20 21")
    child.sendintr()
    child.expect("stopped")
    assert script.left.wait(WAIT)
