"""An event loop whose clock jumps to the next timer where nothing else is left to do: hours pass in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _Selector(selectors.DefaultSelector):
    """Adds to `passed` what it would have waited."""

    passed = 0.0  # seconds
    num_threads = 0  # which are waited for, however long they take

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        waits = timeout is None or (self.num_threads and timeout > 0)
        ready = super().select(None if waits else 0)
        if not ready and timeout:
            self.passed += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selected = _Selector()
        super().__init__(self._selected)

    def time(self) -> float:
        return self._selected.passed

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        def ended(_: Any) -> None:
            self._selected.num_threads -= 1

        future = super().run_in_executor(executor, func, *args)
        self._selected.num_threads += 1
        future.add_done_callback(ended)
        return future


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
