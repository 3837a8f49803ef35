"""A conversation: its history, and one turn at a time."""

from __future__ import annotations

from collections.abc import Generator

from .client import Client
from .request import Message, SamplingOptions
from .results import Result


class Chat:
    """What was said so far, with one server. Not for several threads."""

    def __init__(self, client: Client, system: str | None = None, options: SamplingOptions | None = None) -> None:
        self._client = client
        self._options: SamplingOptions = options or {}
        self._system = system
        self._turns: list[Message] = []
        self.last: Result | None = None  # the answer of the last turn, as far as it came

    @property
    def messages(self) -> list[Message]:
        """The history as the chat template gets it."""
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._turns = []
        self.last = None

    def set_system(self, system: str | None) -> None:
        """A new system prompt, and with it a new conversation."""
        self._system = system
        self.reset()

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces. A stopped answer stays in the history as far as it came; a failed turn does not."""
        question: Message = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self._client.stream(messages=[*self.messages, question], **self._options)
        try:
            for chunk in stream:
                pieces.append(chunk.text)
                yield chunk.text
        except (KeyboardInterrupt, GeneratorExit):
            stream.close()
            self._keep(question, pieces)
            raise
        self.last = stream.result()
        self._keep(question, pieces)

    def _keep(self, question: Message, pieces: list[str]) -> None:
        answer = "".join(pieces)
        if answer:
            self._turns += [question, {"role": "assistant", "content": answer}]
