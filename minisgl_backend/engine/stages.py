"""What the core needs of a scheduler and of a runner."""

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
        """Not None while its tokens wait for `StepRunner.sample`, as those of a step with grammars do."""
        ...

    def result(self) -> StepResult:
        """Waits for the step's tokens."""
        ...


class StepRunner(Protocol):
    """What executes plans: the model's runner, the null runner, or the leader of tensor-parallel ranks."""

    def prepare(self, plan: StepPlan) -> Any: ...

    def execute(self, batch: Any) -> PendingStep: ...

    def sample(self, pending: Any, masks: tuple[Int32Array, Int32Array] | None) -> None:
        """Goes on with a step that waits for it; see Grammars.masks."""
        ...

    def grammar_bitmask(self, count: int) -> Int32Array:
        """Pinned buffer for `count` grammar bitmask rows, int32 [count, ceil(vocab_size / 32)], which `sample` need not
        copy. Good until it has been given to `sample`, or the next call."""
        ...


class StepScheduler(Protocol):
    """What makes plans."""

    def add(self, request: Request) -> None: ...

    def abort(self, uid: int, reason: FinishReason, detail: SequenceDetail | None = None) -> None: ...

    def plan(self) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, result: StepResult) -> None: ...

    def drain_outputs(self) -> SequenceOutputs | None: ...

    def take_cache_changes(self) -> list[CacheChange]: ...

    def stats(self) -> StepStats: ...

    def tenant_stats(self) -> dict[str, TenantStats]: ...
