"""Hypothesis drives the leases of a small pool in any order; a dictionary of prefixes says what must be true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from minisgl_backend.arrays import IdArray
from minisgl_backend.cache.content_ids import FIRST
from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.cache.lease import PageLease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.state_slots import PROVED, SUPERSEDED, UNPROVED
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL, CacheKind, Chunked, Sliding
from tests.fakes import first_seen

NUM_PAGES = 12
MAX_ROWS, MAX_COLUMNS = 4, 16


class LeaseMachine(RuleBasedStateMachine):
    """Sequences over a tiny vocabulary, so that prefixes meet; `contents` pretends to be the device's pages."""

    page_size = 2
    cache_type = "radix"
    kinds: tuple[CacheKind, ...] = (FULL,)
    ids: tuple[int, ...] = (0, 1)
    num_state_slots = 0
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.groups = CacheGroups(self.kinds, self.page_size)
        self.num_pages = NUM_PAGES * len(self.kinds)
        parts = self.num_pages, self.groups, MAX_ROWS, MAX_COLUMNS, self.cache_type
        self.manager = KVManager(*parts, num_state_slots=self.num_state_slots)
        self.stands_for: dict[int, tuple[int, ...]] = {0: ()}  # by slot of a state: the tokens before it
        self.states: dict[PageLease, tuple[int, int]] = {}  # each row's own slot, and its border
        # By page: the group, the tokens before, and its own.
        self.contents: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self.tokens: dict[PageLease, list[int]] = {}
        self.computed: dict[PageLease, int] = {}  # tokens whose pages are there, while a prompt is computed in chunks
        self.swapped: list[np.ndarray] = []

    @rule(target=leases, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14), chunk=st.integers(1, 14))
    def acquire(self, tokens: list[int], chunk: int) -> PageLease | None:
        free_rows = set(range(MAX_ROWS)) - {lease.row for lease in self.tokens}
        if not free_rows:
            return None
        tokens = [self.ids[token % len(self.ids)] for token in tokens]
        array = _ids(tokens)
        expected = self.manager.cached_tokens(array) // self.page_size
        match = self.manager.match(array)
        assert match.num_pages == expected
        end = min(match.num_pages * self.page_size + chunk, len(tokens))
        fits = self.manager.states is None or self.manager.states.fit()
        if not fits or self.manager.pages_to_take(match, len(tokens), end) > self.manager.num_available:
            self.manager.unmatch(match)
            return None
        lease = self.manager.acquire(min(free_rows), match, len(tokens), end)
        self.tokens[lease], self.computed[lease] = list(tokens), end
        self._write(lease, match.num_pages)
        if self.manager.states is not None:
            source, slot = self.manager.states.slots_of(lease.row)
            assert self.stands_for[source] == tuple(tokens[: match.num_pages * self.page_size]), "another's state"
            self.states[lease] = slot, match.num_pages * self.page_size
            self._chunk(lease, match.num_pages * self.page_size)
        return lease

    def _chunk(self, lease: PageLease, start: int) -> None:
        """What the device does with a prompt's chunk that begins at `start`: it leaves states, which are kept."""
        states, (slot, _), end, tokens = (
            self.manager.states,
            self.states[lease],
            self.computed[lease],
            self.tokens[lease],
        )
        assert states is not None
        borders = {
            at: (SUPERSEDED, UNPROVED, PROVED)[at // (2 * self.page_size) % 3]
            for at in range(start + 1, end + 1)
            if at % (2 * self.page_size) == 0
        }
        checkpoints = states.plan_chunk(lease.row, end, borders.items())
        for border, target in checkpoints:
            assert target not in {owned for owned, _ in self.states.values()}, "a row's own slot is written"
            self.stands_for[target] = tuple(tokens[:border])
        border = states.border_of(end)
        self.states[lease] = slot, border
        self.stands_for[slot] = tuple(tokens[:border])
        states.note_computed(lease.row)
        if (swap := self.manager.publish(lease, _ids(tokens[:end]))) is not None:
            self.swapped.append(swap.old)
        for at, target in checkpoints:
            states.keep(lease, at, target, borders[at])

    @rule(lease=leases)
    def keep_its_state(self, lease: PageLease | None) -> None:
        if lease in self.states and self.manager.states is not None:
            self.manager.states.keep_own(lease)  # if its pages are published

    @rule()
    def evict_a_state(self) -> None:
        self.manager._cache.evict_state(proved=True)

    @rule(lease=leases, chunk=st.integers(1, 14))
    def compute_a_chunk(self, lease: PageLease | None, chunk: int) -> None:
        if lease not in self.tokens or not self.groups.num_windows:
            return
        start, total = self.computed[lease], len(self.tokens[lease])
        end = min(start + chunk, total, self.manager.max_tokens_now(lease.row))
        if start < end:
            self.manager.grow(lease.row, end)
            self.computed[lease] = end
            self._write(lease, start // self.page_size)
            if self.manager.states is not None and start % self.page_size == 0:
                self._chunk(lease, start)

    @rule(lease=leases, token=st.integers(0, 1))
    def append(self, lease: PageLease | None, token: int) -> None:
        if lease not in self.tokens or not self._is_computed(lease):
            return
        tokens = self.tokens[lease]
        if len(tokens) % self.page_size == 0:
            column = len(tokens) // self.page_size
            if column >= MAX_COLUMNS:
                return
            rows = np.array([lease.row])
            if self.groups.num_windows:
                self.manager.free_out_of_window(rows, np.array([len(tokens)], dtype=np.int32))
                held = np.count_nonzero(self.manager.pages_of(lease)[self.groups.num_full :], axis=1)
                assert (held <= self.groups.most_kept[:, 0]).all()
            if self.manager.num_available < len(self.kinds):
                return
            self.manager.extend(rows)
        if self.manager.states is not None:
            folds = self.manager.states.fold(np.array([lease.row]), np.array([len(tokens) + 1], dtype=np.int32))
            slot, border = self.states[lease]
            assert (folds is not None) == (len(tokens) - border >= self.page_size)
            if folds is not None:
                assert folds.sources.tolist() == [slot]
                target, border = int(folds.targets[0]), int(folds.borders[0])
                assert border == len(tokens) // self.page_size * self.page_size
                self.stands_for[target] = tuple(tokens[:border])
                self.states[lease] = target, border
        tokens.append(token)
        self.computed[lease] = len(tokens)
        self._write(lease, (len(tokens) - 1) // self.page_size)

    @rule(lease=leases, drop=st.integers(0, 3))
    def publish(self, lease: PageLease | None, drop: int) -> None:
        if lease not in self.tokens:
            return
        end = self.computed[lease] - drop
        swap = self.manager.publish(lease, _ids(self.tokens[lease][: max(end, 0)]))
        if swap is not None:
            self.swapped.append(swap.old)
        if self.groups.num_windows and not drop:
            self.manager.free_out_of_window(np.array([lease.row]), np.array([end], dtype=np.int32))

    @rule()
    def give_back_swapped(self) -> None:
        for pages in self.swapped:
            self.manager.free(pages)
        self.swapped = []

    @rule(lease=consumes(leases), known=st.booleans())
    def release(self, lease: PageLease | None, known: bool) -> None:
        if lease not in self.tokens:
            return
        tokens = self.tokens.pop(lease)[: self.computed.pop(lease)]
        self.states.pop(lease, None)
        self.manager.release(lease, _ids(tokens if known else []))
        with pytest.raises(RuntimeError):
            self.manager.release(lease)

    @invariant()
    def laws_hold(self) -> None:
        passing = np.concatenate(self.swapped) if self.swapped else np.empty(0, dtype=np.int32)
        self.manager.check(self.tokens, passing)

    @invariant()
    def every_state_stands_for_its_tokens(self) -> None:
        for lease, (slot, border) in self.states.items():
            assert self.stands_for[slot] == tuple(self.tokens[lease][:border]), "a row's state was overwritten"
        cache = self.manager._cache
        if self.num_state_slots and isinstance(cache, RadixCache):
            for node in cache._nodes():
                path = [node]
                while (parent := path[-1].parent) is not None:
                    path.append(parent)
                tokens = [token for one in path[::-1] for token in one.token_ids.tolist()]
                start = len(tokens) - len(node.token_ids)
                for column in node.states.nonzero()[0].tolist():
                    end = start + (column + 1) * self.page_size
                    assert self.stands_for[node.states[column]] == tuple(tokens[:end]), "a cached state is another's"

    @invariant()
    def every_lease_reads_its_own_tokens(self) -> None:
        for lease, tokens in self.tokens.items():
            end = self.computed[lease]
            columns = -(-end // self.page_size)
            for group, pages in enumerate(self.manager.pages_of(lease)):
                seen = first_seen(self.kinds[group], end) // self.page_size  # by the next token
                for column, page in list(enumerate(pages.tolist()))[seen:columns]:
                    start = column * self.page_size
                    stop = min(start + self.page_size, end)
                    assert self.contents[page] == (group, tuple(tokens[:start]), tuple(tokens[start:stop]))

    def _is_computed(self, lease: PageLease) -> bool:
        return self.computed[lease] == len(self.tokens[lease])

    def _write(self, lease: PageLease, first_column: int) -> None:
        """What the device does: the page now holds these tokens, computed after those before them."""
        tokens = self.tokens[lease][: self.computed[lease]]
        for group, pages in enumerate(self.manager.pages_of(lease)):
            for column, page in enumerate(pages.tolist()):
                start = column * self.page_size
                if column >= first_column and page and start < len(tokens):
                    self.contents[page] = (group, tuple(tokens[:start]), tuple(tokens[start : start + self.page_size]))


def _ids(tokens: list[int]) -> IdArray:
    """As prompts have them: int64 where some are of contents."""
    return np.array(tokens, dtype=np.int64 if any(token >= FIRST for token in tokens) else np.int32)


CASES = [
    *(((FULL,), page_size, cache_type) for page_size in (1, 2, 3) for cache_type in ("radix", "naive")),
    ((Sliding(1),), 1, "radix"),
    ((Sliding(3),), 2, "radix"),
    ((Sliding(5),), 3, "radix"),
    ((Sliding(2), Sliding(5)), 1, "radix"),
    ((FULL, Sliding(4)), 1, "radix"),
    ((FULL, Sliding(4)), 3, "radix"),
    ((FULL, Sliding(2), Sliding(5)), 2, "radix"),
    ((FULL, FULL, Sliding(3)), 2, "radix"),
    ((FULL, Sliding(4)), 2, "naive"),
    ((Chunked(4),), 2, "radix"),
    ((FULL, Sliding(3), Chunked(5)), 2, "radix"),
    ((FULL, Chunked(3)), 1, "radix"),
    ((FULL, FULL, Sliding(3), Sliding(3)), 2, "radix"),
]


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize(("page_size", "num_slots"), [(1, 9), (2, 5), (3, 14)])
def test_states_stand_for_their_tokens_whatever_happens(page_size: int, num_slots: int, cache_type: str) -> None:
    parts = {"page_size": page_size, "num_state_slots": num_slots, "cache_type": cache_type}
    machine = type("Machine", (LeaseMachine,), parts)
    run_state_machine_as_test(machine, settings=_settings(max_examples=25))


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, Sliding(3))])
def test_any_order_of_prompts_with_contents_keeps_every_law(kinds: tuple[CacheKind, ...]) -> None:
    parts = {"page_size": 2, "kinds": kinds, "ids": (0, FIRST, FIRST + 1)}
    machine = type("Machine", (LeaseMachine,), parts)
    run_state_machine_as_test(machine, settings=_settings(max_examples=15))


@pytest.mark.parametrize(("kinds", "page_size", "cache_type"), CASES)
def test_any_order_of_leases_keeps_every_law(kinds: tuple[CacheKind, ...], page_size: int, cache_type: str) -> None:
    machine = type("Machine", (LeaseMachine,), {"page_size": page_size, "cache_type": cache_type, "kinds": kinds})
    run_state_machine_as_test(machine, settings=_settings(max_examples=25 if kinds == (FULL,) else 15))


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
