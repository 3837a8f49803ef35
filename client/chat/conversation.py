"""A conversation: its history, one turn at a time, and the turns' statistics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..request import Message, question_of
from ..results import Chunk
from ..stream import TextStream

# Messages in, the answer's stream out: the interface of whatever answers.
OpenStream = Callable[[Sequence[Message]], TextStream]

_ROLES = ("system", "user", "assistant", "tool", "developer")
_MAX_FILE_BYTES = 16 << 20


@dataclass
class Turn:
    """Statistics of one answer. Counts are the server's, None if it reports none."""

    started: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    seconds: float = 0.0  # until the end of the answer, or until it was stopped
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None  # prompt tokens that came from the server's prefix cache
    num_output_tokens: int | None = None
    num_pieces: int = 0
    finish_reason: str | None = None
    stopped: bool = False

    def note(self, chunk: Chunk) -> None:
        """A piece has arrived."""
        now = time.monotonic() - self.started
        self.seconds = now
        if chunk.text or thought_of(chunk):
            self.num_pieces += 1
            self.first_token_s = now if self.first_token_s is None else self.first_token_s
        if chunk.num_input_tokens is not None:
            self.num_input_tokens = chunk.num_input_tokens
        if chunk.num_output_tokens is not None:
            self.num_output_tokens = (self.num_output_tokens or 0) + chunk.num_output_tokens
        if "num_cached_tokens" in chunk.extra:
            self.num_cached_tokens = int(chunk.extra["num_cached_tokens"][0])
        self.finish_reason = chunk.finish_reason or self.finish_reason

    @property
    def decode_seconds(self) -> float:
        """Time from the first token on."""
        return 0.0 if self.first_token_s is None else self.seconds - self.first_token_s

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None if there are too few."""
        if not self.num_output_tokens or self.num_output_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.num_output_tokens - 1) / self.decode_seconds


class Chat:
    """The messages so far. Not thread-safe."""

    def __init__(self, open_stream: OpenStream, system: str | None = None) -> None:
        self._open_stream = open_stream
        self._system = system
        self._said: list[Message] = []
        self.images: list[bytes] = []  # of the next question
        self.turns: list[Turn] = []  # of the whole session, including forgotten messages

    @property
    def messages(self) -> list[Message]:
        """The history as passed to the chat template."""
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._said

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._said, self.images = [], []

    def set_system(self, system: str | None) -> None:
        """Sets a new system prompt and starts a new conversation."""
        self._system = system
        self.reset()

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. Raises ValueError where the file cannot be written."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=2)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None

    def load(self, path: Path) -> None:
        """Continues with a file's messages instead of the current ones. Raises ValueError for an invalid file."""
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES >> 20} MiB")
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"{path} holds no messages: {error}") from None
        if not isinstance(messages, list):
            raise ValueError(f"{path} holds no messages; allowed: a JSON list of them")
        for location, message in enumerate(messages):
            _check_message(f"{path}, message {location}", message)
        first = messages[0] if messages else {}
        has_system = first.get("role") == "system" and isinstance(first.get("content"), str)
        self._system = first["content"] if has_system else None
        self._said = messages[1:] if has_system else messages

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """The answer in pieces. A stopped answer stays in the history as far as it arrived; a failed turn does not."""
        question = question_of(text, self.images)
        self.images = []
        pieces: list[str] = []
        turn = Turn()
        stream = self._open_stream([*self.messages, question])
        try:
            for chunk in stream:
                turn.note(chunk)
                pieces.append(chunk.text)
                yield chunk
        except (KeyboardInterrupt, GeneratorExit):
            stream.close()
            turn.stopped = True
            self._keep(question, pieces, turn)
            raise
        self._keep(question, pieces, turn)

    def _keep(self, question: Message, pieces: list[str], turn: Turn) -> None:
        self.turns.append(turn)
        answer = "".join(pieces)
        if answer:
            self._said += [question, {"role": "assistant", "content": answer}]


def thought_of(chunk: Chunk) -> str:
    """A reasoning model's reasoning, if the server separates it from the answer."""
    return str(chunk.extra.get("reasoning_content", ("",))[0])


def _check_message(location: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{location} is {message!r}; allowed: an object with role and content")
    if message.get("role") not in _ROLES:
        raise ValueError(f"{location}: role is {message.get('role')!r}; allowed: {', '.join(_ROLES)}")
    if not isinstance(message.get("content"), (str, list)):
        raise ValueError(f"{location}: content is {message.get('content')!r}; allowed: a text, or a list of parts")
