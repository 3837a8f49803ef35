"""The interfaces that the core needs of a scheduler and of a runner."""

from __future__ import annotations

from typing import Any, Protocol

from minisgl_backend.arrays import Int32Array
from minisgl_backend.cache.changes import CacheChange
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.scheduler.fairness import TenantStats
from minisgl_backend.scheduler.outputs import SequenceOutputs
from minisgl_backend.step import SequenceDetail, StepPlan, StepResult, StepStats


class PendingStep(Protocol):
    """A launched step."""

    @property
    def unsampled(self) -> Any:
        """Not None while its tokens wait for `StepRunner.sample`, as in steps with grammars."""
        ...

    def result(self) -> StepResult:
        """Waits for the step's tokens."""
        ...


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


class StepScheduler(Protocol):
    """Makes plans."""

    def add(self, request: Request) -> None: ...

    def abort(self, uid: int, reason: FinishReason, detail: SequenceDetail | None = None) -> None: ...

    def plan(self) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, result: StepResult) -> None: ...

    def drain_outputs(self) -> SequenceOutputs | None: ...

    def take_cache_changes(self) -> list[CacheChange]: ...

    def stats(self) -> StepStats: ...

    def tenant_stats(self) -> dict[str, TenantStats]: ...
