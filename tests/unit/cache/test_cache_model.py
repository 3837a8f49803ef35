"""Hypothesis drives the leases of a small pool in any order; a dictionary of prefixes says what must be true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from minisgl_backend.cache.kv_manager import KVManager, PageLease

NUM_PAGES = 12
MAX_ROWS = 4


class LeaseMachine(RuleBasedStateMachine):
    """Sequences over a tiny vocabulary, so that prefixes meet; `contents` pretends to be the device's pages."""

    page_size = 2
    cache_type = "radix"
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVManager(NUM_PAGES, self.page_size, MAX_ROWS, NUM_PAGES, self.cache_type)
        self.contents: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # page: (tokens before, its tokens)
        self.tokens: dict[PageLease, list[int]] = {}
        self.swapped: list[np.ndarray] = []

    @rule(target=leases, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def acquire(self, tokens: list[int]) -> PageLease | None:
        free_rows = set(range(MAX_ROWS)) - {lease.row for lease in self.tokens}
        if not free_rows:
            return None
        array = np.array(tokens, dtype=np.int32)
        expected = self.manager.cached_tokens(array) // self.page_size
        match = self.manager.match(array)
        assert len(match.pages) == expected
        if self.manager.pages_for(len(tokens)) - len(match.pages) > self.manager.num_available:
            self.manager.unmatch(match)
            return None
        lease = self.manager.acquire(min(free_rows), match, len(tokens))
        self.tokens[lease] = list(tokens)
        self._write(lease, len(match.pages))
        return lease

    @rule(lease=leases, token=st.integers(0, 1))
    def append(self, lease: PageLease | None, token: int) -> None:
        if lease not in self.tokens:
            return
        tokens = self.tokens[lease]
        if len(tokens) % self.page_size == 0:
            if len(tokens) // self.page_size >= NUM_PAGES or not self.manager.num_available:
                return
            self.manager.extend(np.array([lease.row]))
        tokens.append(token)
        self._write(lease, (len(tokens) - 1) // self.page_size)

    @rule(lease=leases, drop=st.integers(0, 3))
    def publish(self, lease: PageLease | None, drop: int) -> None:
        if lease not in self.tokens:
            return
        swap = self.manager.publish(lease, np.array(self.tokens[lease][: -drop or None], dtype=np.int32))
        if swap is not None:
            self.swapped.append(swap.old)

    @rule()
    def give_back_swapped(self) -> None:
        for pages in self.swapped:
            self.manager.free(pages)
        self.swapped = []

    @rule(lease=consumes(leases), known=st.booleans())
    def release(self, lease: PageLease | None, known: bool) -> None:
        if lease not in self.tokens:
            return
        tokens = self.tokens.pop(lease)
        self.manager.release(lease, np.array(tokens if known else [], dtype=np.int32))
        with pytest.raises(RuntimeError):
            self.manager.release(lease)

    @invariant()
    def laws_hold(self) -> None:
        passing = np.concatenate(self.swapped) if self.swapped else np.empty(0, dtype=np.int32)
        self.manager.check(self.tokens, passing)

    @invariant()
    def every_lease_reads_its_own_tokens(self) -> None:
        for lease, tokens in self.tokens.items():
            for column, page in enumerate(self.manager.pages_of(lease).tolist()):
                start = column * self.page_size
                assert self.contents[page] == (
                    tuple(tokens[:start]),
                    tuple(tokens[start : start + self.page_size]),
                )

    def _write(self, lease: PageLease, first_column: int) -> None:
        """What the device does: the page now holds these tokens, computed after those before them."""
        tokens = self.tokens[lease]
        for column, page in enumerate(self.manager.pages_of(lease).tolist()):
            if column >= first_column:
                start = column * self.page_size
                self.contents[page] = (tuple(tokens[:start]), tuple(tokens[start : start + self.page_size]))


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_any_order_of_leases_keeps_every_law(page_size: int, cache_type: str) -> None:
    machine = type("Machine", (LeaseMachine,), {"page_size": page_size, "cache_type": cache_type})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
