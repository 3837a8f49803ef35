"""Cache of compiled grammars, and of which grammars were refused or slow to compile."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, Generic, TypeVar

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Grammar

ENTRY_TTL_S = 300.0  # how long refusals are repeated, and slow grammars count as slow
MAX_ENTRIES = 256
BYTES_PER_CHAR = 2  # of memory for each character of a grammar's text
ENTRY_BYTES = 4096  # for objects, in addition to the text and to what xgrammar counts

T = TypeVar("T")


class GrammarCache:
    """Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: limit of compiled grammars and their texts, above which the least recently used are evicted.
        Grammars in use are kept alive by their sequences."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # for the attributes below
        self._compiled: OrderedDict[Grammar, tuple[Any, int]] = OrderedDict()  # (compiled, bytes)
        self._bytes = 0
        self._refused = _TtlCache[str]()  # error messages
        self._slow = _TtlCache[bool]()

    def get(self, grammar: Grammar) -> Any:
        """The compiled grammar; None if it is not cached. Raises InvalidRequestError if it was refused recently."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar][0]
            reason = self._refused.get(grammar)
            if reason is not None:
                raise InvalidRequestError(reason)
            return None

    def is_known(self, grammar: Grammar) -> bool:
        """Whether `get` would return a compiled grammar or raise."""
        with self._lock:
            return grammar in self._compiled or self._refused.get(grammar) is not None

    def note_compiled(self, grammar: Grammar, compiled: Any, num_bytes: int) -> None:
        """`num_bytes`: its size according to xgrammar. A grammar larger than the cache is not kept."""
        num_bytes += BYTES_PER_CHAR * len(grammar.text) + ENTRY_BYTES
        with self._lock:
            if self._refused.get(grammar) is not None:
                return  # it was refused meanwhile
            if grammar not in self._compiled and num_bytes <= self._max_bytes:
                self._compiled[grammar] = compiled, num_bytes
                self._bytes += num_bytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._compiled.popitem(last=False)[1][1]

    def note_refused(self, grammar: Grammar, reason: str) -> None:
        """Also evicts the grammar if it was compiled and turned out too slow later."""
        with self._lock:
            self._refused.put(grammar, reason)
            if grammar in self._compiled:
                self._bytes -= self._compiled.pop(grammar)[1]

    def is_slow(self, grammar: Grammar) -> bool:
        with self._lock:
            return self._slow.get(grammar) is not None

    def note_slow(self, grammar: Grammar, is_slow: bool) -> None:
        """Records the latest compilation, since a busy machine makes any grammar slow."""
        with self._lock:
            if is_slow:
                self._slow.put(grammar, True)
            else:
                self._slow.drop(grammar)


class _TtlCache(Generic[T]):
    """Values that expire after ENTRY_TTL_S; the newest MAX_ENTRIES are kept."""

    def __init__(self) -> None:
        self._values: OrderedDict[Grammar, tuple[float, T]] = OrderedDict()  # (time of `put`, value), the oldest first

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
