"""A step of a CPU recorded as it is computed, to be computed again from the same memory: what a graph is on a GPU.

Most of a small model's step is calls of the compiled kernels, before each of which Python takes as long as a GEMM of
few rows does. They are replayed by one call. What torch computes between them is called again, into the same tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl_backend.kernels.cpu.library import CpuLibrary

LARGEST = 256 << 20  # bytes that a recording may keep: of all that its step makes, none of which is freed
_WORDS, _NUMBERS = 16, 2  # integers and pointers of a call, at most, and floats
# Operations whose results depend on more than shapes: what Python does next may be another thing then. The last two
# are what torch does first where a tensor becomes numbers of the host.
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded})
_TO_HOST = ("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense", "aten::resolve_conj", "aten::resolve_neg")
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class _Call(ctypes.Structure):
    """`Call` of replay.cpp."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("numbers", ctypes.c_float * _NUMBERS),
        ("words", ctypes.c_int64 * _WORDS),
    )


class Recording(TorchDispatchMode):
    """Used as a context in which a step is computed; afterwards `refusal` or `replay`.

    What it is computed from must be in memory that does not move, and so must its weights. Its outputs are those of the
    first time, overwritten by each replay.
    """

    refusal: str | None = None  # what cannot be computed again without Python; None: nothing of it

    def __init__(self, library: CpuLibrary) -> None:
        super().__init__()
        self._library, self._thread = library, threading.get_ident()
        self._functions: dict[str, Any] = {}  # what the library's are, while this is in their place
        self._steps: list[Callable[[], object]] = []
        self._calls: list[_Call] = []  # since the last of `_steps`
        self._kept: list[object] = []  # what owns memory whose addresses are in calls
        self._made: list[torch.UntypedStorage] = []  # in memory of their own
        self._num_bytes = 0  # of `_made`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # of this mode itself: torch would import its compiler, which takes a second

    def __enter__(self) -> Recording:
        self._library.recorded.acquire()
        try:
            for name, function in list(vars(self._library).items()):
                if name.startswith("minisgl_") and name != "minisgl_replay":  # which calls of steps are bound to
                    self._functions[name] = function
                    setattr(self._library, name, partial(self._call, function))
            super().__enter__()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._restore()
        self._end_calls()

    def _restore(self) -> None:
        for name, function in self._functions.items():
            setattr(self._library, name, function)
        self._functions.clear()
        self._library.recorded.release()

    def replay(self) -> None:
        """Computes the step again, on the thread's own: nothing else may compute meanwhile."""
        for step in self._steps:
            step()

    def repeats(self, out: torch.Tensor) -> bool:
        """Whether a replay computes `out` again, to the bit, if all that was made for it is lost: whether nothing that
        it needs was computed elsewhere. Where it does not, what the step has computed is overwritten."""
        expected = out.view(torch.uint8).clone()
        for made in self._made:
            ctypes.memset(made.data_ptr(), 255, made.nbytes())
        self.replay()
        return torch.equal(out.view(torch.uint8), expected)

    def _call(self, function: Any, *arguments: Any) -> None:
        function(*arguments)
        if threading.get_ident() != self._thread or self.refusal is not None:  # of another engine of this process
            return
        numbers, words = [], []
        for kind, argument in zip(function.argtypes, arguments, strict=True):
            if kind is ctypes.c_float:
                numbers.append(argument)
            elif kind is ctypes.c_void_p:
                words.append(ctypes.cast(argument, kind).value or 0)
            else:
                words.append(int(argument))
        call = _Call(function=ctypes.cast(function, ctypes.c_void_p).value)
        call.numbers[: len(numbers)], call.words[: len(words)] = numbers, words
        self._calls.append(call)
        self._kept.append(arguments)

    def _end_calls(self) -> None:
        if self._calls:
            calls = (_Call * len(self._calls))(*self._calls)
            self._steps.append(partial(self._library.minisgl_replay, calls, len(calls)))
            self._calls = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.refusal is not None:
            return out
        self._kept.append((args, kwargs, out))
        name, outputs, inputs = function._schema.name, tree_leaves(out), tree_leaves((args, kwargs))
        if name in _ALLOCATIONS:
            self._note(_storages(outputs).values())
            return out
        if _depends_on_numbers(function, inputs) or not all(isinstance(one, torch.Tensor) for one in outputs):
            self._refuse(name)
            return out
        of_inputs = _storages(inputs)
        made = [storage for place, storage in _storages(outputs).items() if place not in of_inputs]
        if function._schema.is_mutable:
            self._end_calls()
            self._steps.append(partial(function, *args, **kwargs))
        elif made:  # else views
            self._end_calls()
            self._steps.append(partial(_compute_into, outputs, partial(function, *args, **kwargs)))
            self._note(made)
        return out

    def _note(self, made: Iterable[torch.UntypedStorage]) -> None:
        for storage in made:
            self._made.append(storage)
            self._num_bytes += storage.nbytes()
        if self._num_bytes > LARGEST:
            self._refuse(f"they take more than {LARGEST >> 20} MiB")

    def _refuse(self, why: str) -> None:
        """Keeps nothing of the step any more."""
        self.refusal = why
        for kept in (self._steps, self._calls, self._kept, self._made):
            kept.clear()


def _storages(values: list[object]) -> dict[int, torch.UntypedStorage]:
    """Those of tensors among the values, by address."""
    storages = [one.untyped_storage() for one in values if isinstance(one, torch.Tensor)]
    return {storage.data_ptr(): storage for storage in storages}


def _depends_on_numbers(function: Any, inputs: list[object]) -> bool:
    """Whether what Python does after it may depend on more than the inputs' shapes."""
    if function._schema.name == "aten::index":  # only with masks
        return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in inputs[1:])
    return function._schema.name in _TO_HOST or not _TAGS.isdisjoint(function.tags)


def _compute_into(outputs: list[torch.Tensor], compute: Callable[[], object]) -> None:
    for output, found in zip(outputs, tree_leaves(compute()), strict=True):
        output.copy_(found)
