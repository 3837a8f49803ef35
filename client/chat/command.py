"""The loop of `minisgl chat`: lines are questions, or commands that begin with a slash."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ..console import hint, remark, say_error
from ..errors import ClientError
from .conversation import Chat, Turn, thought_of
from .prompt import Prompt, default_history
from .screen import MarkdownScreen, PlainScreen, Screen


@dataclass(frozen=True)
class _Command:
    """A /command's action, and its /help text."""

    act: Callable[[str], bool | None]  # False leaves the chat
    argument: str
    help: str


class ChatLoop:
    """One session at the terminal."""

    def __init__(self, chat: Chat, markdown: bool) -> None:
        """`markdown`: answers are rendered, for a terminal."""
        self._chat = chat
        self._screen: Screen = MarkdownScreen(Console()) if markdown else PlainScreen()
        self._commands = {
            "/help": _Command(self._help, "", "this list"),
            "/reset": _Command(self._reset, "", "forget the conversation"),
            "/system": _Command(self._system, "TEXT", "a system prompt, and a new conversation; without TEXT none"),
            "/image": _Command(self._image, "FILE", "an image for the next question, where the model sees"),
            "/save": _Command(self._save, "FILE", "write the messages, as JSON"),
            "/load": _Command(self._load, "FILE", "go on with the messages of a file"),
            "/stats": _Command(self._stats, "", "times and tokens of the last answer and the session"),
            "/exit": _Command(lambda _: False, "", "leave; so does Ctrl-D"),
        }
        self._has_failed = False
        self._aliases = {"/quit": "/exit", "/?": "/help"}

    def run(self) -> bool:
        """Runs until /exit or the end of the input. False: an answer was an error."""
        prompt = Prompt(list(self._commands), default_history())
        opening = "/help lists the commands; Ctrl-C stops an answer"
        try:
            while True:
                try:
                    if opening:
                        remark(opening)
                        opening = ""
                    line = prompt.read()
                except KeyboardInterrupt:
                    self._say("")
                    remark("/exit or Ctrl-D leaves")
                    continue
                if line is None:
                    break
                if not line.startswith("/"):
                    self._answer(line)
                elif not self._obey(line):
                    break
        finally:
            prompt.close()
        return not self._has_failed

    def _obey(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        command = self._commands.get(self._aliases.get(name, name))
        if command is None:
            self._say(f"({name} is unknown; /help lists the commands)")
            return True
        try:
            return command.act(argument.strip()) is not False
        except ValueError as error:
            say_error(f"[red]error:[/red] {escape(str(error))}")
            return True

    def _help(self, _: str) -> None:
        left = {name: f"{name} {command.argument}".strip() for name, command in self._commands.items()}
        width = max(map(len, left.values()))
        for name, command in self._commands.items():
            self._say(f"{left[name]:<{width}}  {command.help}")
        self._say(f"{'Ctrl-C':<{width}}  stop an answer")

    def _reset(self, _: str) -> None:
        self._chat.reset()
        self._say("(the conversation is forgotten)")

    def _system(self, text: str) -> None:
        self._chat.set_system(text or None)
        self._say(f"(a new conversation {'with this' if text else 'without a'} system prompt)")

    def _image(self, name: str) -> None:
        path = _path("/image", name)
        try:
            self._chat.images.append(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
        self._say(f"({len(self._chat.images)} for the next question)")

    def _save(self, name: str) -> None:
        path = _path("/save", name)
        self._chat.save(path)
        self._say(f"({len(self._chat.messages)} messages written to {path})")

    def _load(self, name: str) -> None:
        self._chat.load(_path("/load", name))
        self._say(f"({len(self._chat.messages)} messages loaded)")

    def _stats(self, _: str) -> None:
        turns = self._chat.turns
        if not turns:
            self._say("(no answer yet)")
            return
        self._say(f"last answer: {describe([turns[-1]])}")
        self._say(f"session, {len(turns)} {'answer' if len(turns) == 1 else 'answers'}: {describe(turns)}")

    def _answer(self, text: str) -> None:
        screen = self._screen
        try:
            with contextlib.closing(self._chat.ask(text)) as answer:
                for chunk in answer:
                    if thought := thought_of(chunk):
                        screen.think(thought)
                    screen.write(chunk.text)
        except KeyboardInterrupt:
            screen.end()
            self._say(" (stopped)" if isinstance(screen, PlainScreen) else "(stopped)")
            return
        except ClientError as error:
            self._has_failed = True
            screen.end()
            if isinstance(screen, PlainScreen):
                self._say("")
            say_error(f"[red]{type(error).__name__}:[/red] {escape(str(error) + hint(error))}")
            return
        screen.end()
        if isinstance(screen, PlainScreen):
            self._say("")
        remark(describe([self._chat.turns[-1]]))

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def describe(turns: Sequence[Turn]) -> str:
    """Times and tokens of some answers, in one line; times are means."""
    first = [turn.first_token_s for turn in turns if turn.first_token_s is not None]
    timed = [turn for turn in turns if turn.tokens_per_s is not None]
    parts = []
    if first:
        parts.append(f"first token {sum(first) / len(first) * 1e3:,.0f} ms")
    if timed:
        tokens = sum((turn.num_output_tokens or 0) - 1 for turn in timed)
        parts.append(f"{tokens / sum(turn.decode_seconds for turn in timed):,.1f} tokens/s")
    inputs = [turn.num_input_tokens for turn in turns if turn.num_input_tokens is not None]
    cached = [turn.num_cached_tokens for turn in turns if turn.num_cached_tokens is not None]
    if inputs:
        share = f" ({sum(cached):,} cached)" if cached else ""
        parts.append(f"{sum(inputs):,} tokens in{share}")
    outputs = [turn.num_output_tokens for turn in turns]
    if None not in outputs:
        parts.append(f"{sum(filter(None, outputs)):,} out")
    else:
        parts.append(f"{sum(turn.num_pieces for turn in turns):,} pieces")
    reasons = [turn.finish_reason for turn in turns]
    if len(turns) == 1:
        parts.append("stopped" if turns[0].stopped else f"finish reason {reasons[0]}")
    return ", ".join(parts)


def _path(command: str, name: str) -> Path:
    if not name:
        raise ValueError(f"{command} needs the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~ and an unknown user
        raise ValueError(f"{name}: {error}") from None
