"""Candidate kernels and the conditions under which they run: the rows of the tables in linear/choose.py and
moe/choose.py.

A table is read from the top: the first row whose condition holds is what runs, so the last row has no condition. Where
that row is `close`, later rows that hold and are close, too, contend with it: measuring them at start may prefer one of
them (linear/tuning/measured.py). Without a measurement the table's order decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.lazy_import import load_attribute

Key = TypeVar("Key")
PLAIN = "plain"  # weights in the model's own number format, as a weight format
REMEMBERED = 8192  # choices of one kind of weights: a few shapes by the row counts of steps


def never(key: object, facts: DeviceFacts) -> bool:
    return False


def always(key: object, facts: DeviceFacts) -> bool:
    return True


def anywhere(facts: DeviceFacts) -> bool:
    return True


def on_gpu(facts: DeviceFacts) -> bool:
    """On a GPU that this project's kernels run on."""
    return facts.kind == "cuda" and facts.own_kernels


def on_cpu(facts: DeviceFacts) -> bool:
    """On a CPU that has compiled kernels."""
    return facts.kind == "cpu" and facts.own_kernels


def not_on_cpu(facts: DeviceFacts) -> bool:
    return not on_cpu(facts)


def not_on_gpu(facts: DeviceFacts) -> bool:
    return not on_gpu(facts)


@dataclass(frozen=True)
class Candidate(Generic[Key]):
    """One row. Several may name the same kernel, each with its own reason."""

    kernel: str
    why: str  # it is taken where `serves` holds; for people, and printed by `minisgl kernels`
    serves: Callable[[Key, DeviceFacts], bool]
    close: Callable[[Key, DeviceFacts], bool] = never  # it may be faster than other close rows, or slower
    run: str = ""  # MODULE:FUNCTION, imported when it is first chosen: tables need neither Triton nor a GPU
    arguments: tuple[object, ...] = ()  # given to it before all others
    on: Callable[[DeviceFacts], bool] = anywhere  # devices that have it at all


Table = Mapping[str, Sequence[Candidate[Key]]]  # by weight format
Run = Callable[..., Any]


class Chooser(Generic[Key]):
    """Chooses kernels for one weight format on one device. A key is evaluated once; then its choice is a look-up."""

    kernel: Callable[[Key], str]  # the name of what runs for a key
    run: Callable[[Key], Run]  # what runs for a key

    def __init__(self, table: Table[Key], weight_format: str, facts: DeviceFacts) -> None:
        self.weight_format, self._facts = weight_format, facts
        self._rows = [row for row in table[weight_format] if row.on(facts)]
        self._remember()

    def candidate(self, key: Key) -> Candidate[Key]:
        """The row that runs for a key."""
        return next(row for row in self._rows if row.serves(key, self._facts))

    def contenders(self, key: Key) -> tuple[str, ...]:
        """Kernels that may be the fastest for a key, the table's choice first; empty where there is no other."""
        first, *later = (row for row in self._rows if row.serves(key, self._facts))
        if not first.close(key, self._facts):
            return ()
        rivals = dict.fromkeys(row.kernel for row in later if row.close(key, self._facts))
        return (first.kernel, *(kernel for kernel in rivals if kernel != first.kernel)) if rivals else ()

    def by_name(self, kernel: str) -> Run:
        """What a kernel of the table runs."""
        row = next(row for row in self._rows if row.kernel == kernel)
        found: Run = load_attribute(row.run)
        return partial(found, *row.arguments) if row.arguments else found

    @property
    def only(self) -> Run | None:
        """What runs for every key, where the device has no other row."""
        return self.by_name(self._rows[0].kernel) if len(self._rows) == 1 else None

    def _remember(self) -> None:
        """Forgets earlier choices."""
        self.kernel = lru_cache(maxsize=REMEMBERED)(self._kernel)
        self.run = lru_cache(maxsize=REMEMBERED)(lambda key: self.by_name(self.kernel(key)))

    def _kernel(self, key: Key) -> str:
        return self.candidate(key).kernel
