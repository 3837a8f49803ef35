"""The interfaces that the core needs of a runner."""

from __future__ import annotations

from typing import Any, Protocol

from minisgl_backend.arrays import Int32Array
from minisgl_backend.step import StepPlan, StepResult


class PendingStep(Protocol):
    """A launched step."""

    @property
    def unsampled(self) -> Any:
        """Not None while its tokens wait for `StepRunner.sample`, as in steps with grammars."""
        ...

    def result(self) -> StepResult:
        """Waits for the step's tokens."""
        ...


class Adapters(Protocol):
    """The adapters that all ranks of an engine have on their hosts: see AdapterHost."""

    def begin(self, number: int, folder: str) -> None: ...

    def is_read(self, number: int) -> bool: ...

    def keep(self, number: int) -> bytes | None: ...

    def drop(self, number: int) -> None: ...


class StepRunner(Protocol):
    """Executes plans: the model's runner, the null runner, or rank 0's runner with its followers."""

    def prepare(self, plan: StepPlan) -> Any: ...

    def execute(self, batch: Any) -> PendingStep: ...

    def sample(self, pending: Any, masks: tuple[Int32Array, Int32Array] | None) -> None:
        """Continues a step that waits for it; for `masks` see GrammarManager.masks."""
        ...

    def grammar_bitmask(self, count: int) -> Int32Array:
        """Pinned buffer for `count` grammar bitmask rows, int32 [count, ceil(vocab_size / 32)], which `sample` need not
        copy. Valid until it has been given to `sample`, or the next call."""
        ...
