"""Triton's interpreter without what it does over and over: half of its time, and nothing that a kernel sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """It puts its own functions into `triton.language` when a kernel starts, and again at each call of a function in
    the kernel, `tl.sum` and `tl.max` among them: here at the first of them. And it makes a table of all types whenever
    it looks one up: here once for each. These are names of its own: a version without them does it as it likes.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        launch, patch, look_up = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
        no_scope = interpreter._LangPatchScope
    except (ImportError, AttributeError):
        yield
        return
    patched: set[tuple[bool, bool]] = set()  # which modules a function sees, of those called in the launch that runs
    numpy_types: dict[str, Any] = {}

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        modules = tl in seen, tl.core in seen
        if modules in patched:
            return no_scope()
        patched.add(modules)
        return patch(function)

    def look_up_once(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if element.name not in numpy_types:
            numpy_types[element.name] = look_up(element)
        return numpy_types[element.name]

    with pytest.MonkeyPatch.context() as change:
        change.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        change.setattr(interpreter, "_patch_lang", patch_once)
        change.setattr(interpreter, "_get_np_dtype", look_up_once)
        yield
