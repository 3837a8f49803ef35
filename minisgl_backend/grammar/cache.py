"""What is remembered of grammars: how they look compiled, why they were refused, and which took long."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Grammar

ENTRY_TTL_S = 300.0  # how long what was refused is, and what was slow counts as slow
MAX_ENTRIES = 256
BYTES_PER_CHAR = 2  # of memory for each character of a grammar's text
ENTRY_BYTES = 4096  # beside what xgrammar counts and the text: of both sides' objects

T = TypeVar("T")


class GrammarCache:
    """Used by all threads of the compilers."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of compiled grammars and their texts, beside those in use; the one asked for longest ago goes
        first."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # of what follows
        self._compiled: OrderedDict[Grammar, tuple[Any, int]] = OrderedDict()  # and its bytes
        self._bytes = 0
        self._refused = _TtlCache[str]()  # why
        self._slow = _TtlCache[bool]()

    def get(self, grammar: Grammar) -> Any:
        """What was compiled before; None where it was not, or is forgotten. Raises InvalidRequestError for what was
        refused not long ago."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar][0]
            reason = self._refused.get(grammar)
            if reason is not None:
                raise InvalidRequestError(reason)
            return None

    def is_known(self, grammar: Grammar) -> bool:
        """`get` has something to say."""
        with self._lock:
            return grammar in self._compiled or self._refused.get(grammar) is not None

    def note_compiled(self, grammar: Grammar, compiled: Any, num_bytes: int) -> None:
        """`num_bytes`: what xgrammar says that it takes. One that is too large alone is not remembered."""
        num_bytes += BYTES_PER_CHAR * len(grammar.text) + ENTRY_BYTES
        with self._lock:
            if self._refused.get(grammar) is not None:
                return  # meanwhile
            if grammar not in self._compiled and num_bytes <= self._max_bytes:
                self._compiled[grammar] = compiled, num_bytes
                self._bytes += num_bytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._compiled.popitem(last=False)[1][1]

    def note_refused(self, grammar: Grammar, reason: str) -> None:
        """Also of one that was compiled, and turned out later to be too much."""
        with self._lock:
            self._refused.put(grammar, reason)
            if grammar in self._compiled:
                self._bytes -= self._compiled.pop(grammar)[1]

    def is_slow(self, grammar: Grammar) -> bool:
        with self._lock:
            return self._slow.get(grammar) is not None

    def note_slow(self, grammar: Grammar, is_slow: bool) -> None:
        """How it was this time: a busy machine makes any grammar slow."""
        with self._lock:
            if is_slow:
                self._slow.put(grammar, True)
            else:
                self._slow.drop(grammar)


class _TtlCache(Generic[T]):
    """Values of not long ago, MAX_REMEMBERED of them."""

    def __init__(self) -> None:
        self._values: OrderedDict[Grammar, tuple[float, T]] = OrderedDict()  # and since when, the oldest first

    def get(self, grammar: Grammar) -> T | None:
        since, value = self._values.get(grammar, (0.0, None))
        return value if time.monotonic() - since < ENTRY_TTL_S else None

    def put(self, grammar: Grammar, value: T) -> None:
        self.drop(grammar)
        self._values[grammar] = time.monotonic(), value
        while len(self._values) > MAX_ENTRIES:
            self._values.popitem(last=False)

    def drop(self, grammar: Grammar) -> None:
        self._values.pop(grammar, None)
