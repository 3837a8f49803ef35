"""Commands that every engine core carries out: given to all of them at once, done when the last one has answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from minisgl_backend.delivery.core_link import CoreLink
from minisgl_backend.errors import CapacityError, EngineDeadError
from minisgl_backend.ipc.messages import AdapterCommand, Done, Failed

LOST = "an engine core ended before it had answered; try again in a few seconds"


class CoreCommands:
    """Of one front; thread-safe. `changed` guards the links, too."""

    def __init__(self, links: Sequence[CoreLink], front: int, changed: threading.Condition) -> None:
        self._links, self._front, self._changed = links, front, changed
        # Starts at the time, so that a front that starts again does not take answers to the one before it for its own.
        self._next = time.time_ns() // 1000
        self._answers: dict[int, dict[int, Done | Failed]] = {}  # of those that are awaited, by id and core

    def new_id(self) -> int:
        """The id of a command, which none has again."""
        with self._changed:
            self._next += 1
            return self._next

    def ask_all(self, number: int, make: Callable[[int], AdapterCommand], timeout_s: float) -> list[Done | Failed]:
        """Gives every core the command with this id (made for this front's number) and waits for all answers, in the
        order of the cores. A core that is down has failed (EngineDeadError), as one that does not answer in time
        (CapacityError)."""
        command = make(self._front)
        with self._changed:
            answers = self._answers.setdefault(number, {})
        for link in self._links:
            try:
                link.send(command)
            except EngineDeadError as error:
                self.note(link.core, _failed(number, error))
        with self._changed:
            self._changed.wait_for(lambda: len(answers) == len(self._links), timeout_s)
            del self._answers[number]
        late = _failed(number, CapacityError(f"an engine core has not answered within {timeout_s:g} s"))
        return [answers.get(link.core, late) for link in self._links]

    def note(self, core: int, answer: Done | Failed) -> None:
        """A core has answered; only its first answer counts."""
        with self._changed:
            if (answers := self._answers.get(answer.id)) is not None:
                answers.setdefault(core, answer)
                self._changed.notify_all()

    def note_down(self, core: int) -> None:
        """It answers none of the commands that it has."""
        for number in list(self._answers):
            self.note(core, _failed(number, EngineDeadError(LOST)))


def _failed(number: int, error: Exception) -> Failed:
    return Failed(id=number, kind=type(error).__name__, message=str(error))
