"""Models with states: which prefixes are found again, how much is computed anew, and that decoding never waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from minisgl_backend.request import FinishReason, PoolingParams
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.speculation.proposer import Proposer
from tests.fakes import FakeRunner, Loop, fake_answers, make_request
from tests.proposers import EveryDraft, KnowingProposer

PAGE = 8


def limits(**changes: Any) -> SchedulerLimits:
    page_size = changes.get("page_size", PAGE)
    values = {
        "page_size": page_size,
        "num_pages": 4000 // page_size,
        "max_seq_len": 1000,
        "max_running_requests": 4,
        "max_waiting_requests": 100,
        "max_prefill_length": 256,
        "mixed_prefill_length": 256,
        "chunk_multiple": page_size,
        "num_state_slots": 40,
    }
    return SchedulerLimits(**{**values, **changes})


class Served:
    """A scheduler with a pretended device that knows for which tokens each state stands."""

    def __init__(self, bounds: SchedulerLimits, proposer: Proposer | None = None, *, check: bool = True) -> None:
        control = EveryDraft(bounds.most_drafts) if proposer is not None else None
        self.scheduler = Scheduler(bounds, seed=1, clock=lambda: 0.0, proposer=proposer, control=control)
        self.runner = FakeRunner(bounds)
        self.loop = Loop(self.scheduler, self.runner, overlap=True, check=check)
        self.next_uid = 0

    def add(self, prompt: list[int], **params: Any) -> int:
        params = {"max_tokens": 1, "ignore_eos": True, **params}
        request = make_request(self.next_uid, prompt, **params)
        self.next_uid += request.params.n
        self.scheduler.add(request)
        return request.uid

    def ask(self, prompt: list[int], **params: Any) -> tuple[int, list[int]]:
        """Runs one request alone; returns its cached tokens (-1: it failed) and its answer."""
        uid = self.add(prompt, **params)
        self.loop.run()
        return self.cached(uid), self.loop.records.tokens.get(uid, [])

    def cached(self, uid: int) -> int:
        found = [one.cached_tokens for one in self.loop.records.details[uid] if one.cached_tokens is not None]
        return found[0] if found else -1


def text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 97, length)]


@pytest.mark.parametrize("budget", [8, 64, 256])
@pytest.mark.parametrize("shared", [8, 9, 15, 40, 63, 200])
def test_the_third_request_of_a_shared_prompt_computes_less_than_a_page_more_than_its_own(
    shared: int, budget: int
) -> None:
    served = Served(limits(max_prefill_length=budget, mixed_prefill_length=budget))
    cached = [served.ask([*text(0, shared), *text(1 + turn, 30)])[0] for turn in range(4)]
    assert cached[0] == 0
    assert all(shared - PAGE < found <= shared for found in cached[2:]), cached


@pytest.mark.parametrize("shared", [8, 20, 100])
def test_so_does_the_second_one_where_its_border_is_told(shared: int) -> None:
    served = Served(limits())
    cached = [served.ask([*text(0, shared), *text(1 + turn, 30)], borders=(shared,))[0] for turn in range(3)]
    assert cached == [0, shared // PAGE * PAGE, shared // PAGE * PAGE]


def test_a_long_prompt_that_differs_early_computes_at_most_as_much_again() -> None:
    served, prompt = (
        Served(limits(page_size=32, num_pages=4000, max_seq_len=70_000, max_prefill_length=4096)),
        text(0, 60_000),
    )
    served.ask(prompt)
    for turn, kept in enumerate((58_000, 50_000, 30_000)):
        cached, _ = served.ask([*prompt[:kept], *text(1 + turn, 60_000 - kept)])
        assert kept - 32 - max(60_000 - kept, 8192) < cached <= kept


def test_states_within_a_long_prompt_take_no_slot_from_others() -> None:
    bounds = limits(page_size=32, num_pages=4000, max_seq_len=70_000, max_prefill_length=4096, num_state_slots=5)
    served = Served(bounds)
    for turn in range(2):
        served.ask(text(turn, 40))
    served.ask(text(2, 60_000))
    assert [served.ask(text(turn, 40))[0] for turn in range(2)] == [32, 32]


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_an_equal_prompt_is_found_whatever_its_length(page_size: int) -> None:
    for length in range(page_size + 1, 4 * page_size + 2):
        served = Served(limits(page_size=page_size))
        assert served.ask(text(0, length))[0] == 0
        assert served.ask(text(0, length))[0] == (length - 1) // page_size * page_size


def test_nested_prefixes_are_all_found() -> None:
    served = Served(limits())
    stem, branch = text(0, 50), text(1, 50)
    for turn in range(3):
        served.ask([*stem, *text(10 + turn, 20)])
        served.ask([*stem, *branch, *text(20 + turn, 20)])
    assert served.ask([*stem, *text(30, 20)])[0] == 48
    assert served.ask([*stem, *branch, *text(31, 20)])[0] == 96


def chat_turn(served: Served, chat: int, history: list[int], *, thinks: bool) -> tuple[int, int, list[int]]:
    """One more turn of a chat whose template ends prompts with three tokens of its own, which a later turn renders
    otherwise; where it `thinks`, its answers are rendered anew, too. Returns the cached tokens, those of the prompt
    that an earlier turn has had, and the prompt of the turn with its answer as later ones have it."""
    generation_prompt = [1, 2, 3]
    stable = [*history, *text(1000 * chat + len(history), 25)]
    uid = served.add([*stable, *generation_prompt], stable_len=len(stable), max_tokens=20)
    served.loop.run()
    answer = served.loop.records.tokens[uid]
    later = [*stable, 4, *answer[10:]] if thinks else [*stable, *generation_prompt, *answer]
    return served.cached(uid), len(stable) if thinks else len(later) - 1, later


@pytest.mark.parametrize("thinks", [False, True])
def test_a_chat_goes_on_where_it_was_among_others(thinks: bool) -> None:
    served = Served(limits(num_state_slots=4 * 41, num_pages=2000), check=False)
    system, chats = text(0, 40), {chat: (0, text(0, 40)) for chat in range(41)}
    for turn in range(3):
        for chat, (known, history) in chats.items():
            cached, now_known, later = chat_turn(served, chat, history, thinks=thinks)
            least = known if turn else 0 if chat < 2 else len(system)
            assert least - PAGE <= cached, (turn, chat, cached, known)
            chats[chat] = now_known, later


def test_after_every_state_is_evicted_answers_are_the_same() -> None:
    served, alone = Served(limits(num_state_slots=3)), Served(limits(cache_type="naive"))
    prompts = [[*text(0, 40), *text(turn % 5, 30)] for turn in range(15)]
    for prompt in prompts:
        assert served.ask(prompt, max_tokens=12)[1] == alone.ask(prompt, max_tokens=12)[1]
    assert served.scheduler.stats().total_cached_tokens > 0
    assert alone.scheduler.stats().total_cached_tokens == 0


def test_eviction_keeps_a_prefix_that_several_requests_have_used() -> None:
    served = Served(limits(num_state_slots=10))
    for turn in range(3):
        served.ask([*text(0, 80), *text(1 + turn, 20)])
    for turn in range(40):  # each leaves two states that nobody uses
        served.ask(text(100 + turn, 40), max_tokens=20)
    assert served.ask([*text(0, 80), *text(50, 20)])[0] == 80


@pytest.mark.parametrize("length", [30, 32, 33, 40])
def test_siblings_compute_at_most_a_page_each(length: int) -> None:
    served = Served(limits(max_running_requests=6))
    served.add(text(0, length), n=5, max_tokens=30)
    served.loop.run()
    chunks = [chunk for plan in served.runner.plans for chunk in plan.prefill]
    assert len(chunks[0].token_ids) == length
    assert len(chunks) == 5
    assert all(len(chunk.token_ids) <= PAGE for chunk in chunks[1:])


@pytest.mark.parametrize("most_drafts", [0, 3, 12])
def test_a_preempted_row_goes_on_from_its_last_border(most_drafts: int) -> None:
    proposer = KnowingProposer("right", 97, fake_answers(97)) if most_drafts else None
    bounds = limits(max_running_requests=2, most_drafts=most_drafts, most_draft_entries=40)
    served = Served(bounds, proposer)
    uids = [served.add(text(uid, 20 + uid), max_tokens=90, priority=9) for uid in range(2)]
    for turn in range(8):
        for _ in range(2 + turn):
            served.loop.step()
        uids.append(served.add(text(10 + turn, 30), max_tokens=5))
    served.loop.run()
    assert served.scheduler.stats().total_preempted > 4
    seen: set[int] = set()
    for one in (one for plan in served.runner.plans for one in plan.admitted):
        recomputed = len(one.token_ids) - 1 - one.cached_len  # its last token was not computed before
        assert one.uid not in seen or recomputed <= PAGE + most_drafts, (one.uid, recomputed)
        seen.add(one.uid)
    assert [len(served.loop.records.tokens[uid]) for uid in uids] == [90, 90, *[5] * 8]


def test_a_preempted_row_finds_the_state_that_its_prompt_had_left() -> None:
    """Others that nobody has used make room for what comes next, though they are newer."""
    served = Served(limits(max_running_requests=1, num_state_slots=4))
    preempted = served.add(text(0, 44), max_tokens=20, priority=9, stable_len=43)
    for _ in range(3):
        served.loop.step()
    for turn in range(6):
        served.add(text(1 + turn, 44))
    served.loop.run()
    assert served.scheduler.stats().total_preempted == 1
    admitted = [one for plan in served.runner.plans for one in plan.admitted if one.uid == preempted]
    assert [one.cached_len for one in admitted] == [0, 40]


@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_decoding_never_waits_for_a_slot(num_slots: int) -> None:
    served = Served(limits(num_state_slots=num_slots))
    for uid in range(6):
        served.add([*text(0, 30), *text(uid, 10)], max_tokens=50)
    served.loop.run()
    for before, after in zip(served.runner.plans, served.runner.plans[1:], strict=False):
        ended = {row for row in before.decode_rows.tolist() if row not in after.decode_rows.tolist()}
        for row in ended:
            lengths = before.decode_lengths[before.decode_rows == row]
            assert lengths.tolist() in ([89], [90]), "a row left out a step before its end"


@pytest.mark.parametrize("num_slots", range(2, 9))
def test_rows_that_fold_together_use_no_slot_that_one_of_them_reads(num_slots: int) -> None:
    """All begin with a state that the cache keeps, and of which it lets the oldest go when they fold."""
    served = Served(limits(num_state_slots=num_slots))
    for uid in range(4):
        served.add(text(uid, 41), max_tokens=60)
    served.loop.run()  # the runner looks
    assert served.runner.states is not None
    assert served.runner.states.num_folds > 20


def test_a_prompt_refused_for_want_of_a_slot_starts_when_one_is_free() -> None:
    """The first chunk reads the only other slot, and publishes no page when it is committed."""
    served = Served(limits(num_state_slots=2))
    served.ask(text(0, 40))
    served.add([*text(0, 40), *text(1, 5)], max_tokens=200)
    second = served.add(text(2, 40))
    for _ in range(5):
        served.loop.step()
    assert served.cached(second) == 0
    served.loop.run()


def test_a_row_that_finds_no_slot_takes_its_own_back_out_of_the_cache() -> None:
    served = Served(limits(num_state_slots=2))
    for uid in range(2):
        served.add(text(uid, 39), max_tokens=20)
    for _ in range(2):
        served.loop.step()
    assert served.scheduler._running.kv.cached_tokens(np.array(text(0, 39), np.int32)) == 32
    served.loop.run()
    folds = [(plan.fold_sources.tolist(), plan.fold_targets.tolist()) for plan in served.runner.plans]
    assert all(sources == targets for sources, targets in folds)
    assert any(sources for sources, _ in folds)
    assert served.ask([*text(0, 39), *served.loop.records.tokens[0]])[0] == 56
    assert served.ask(text(0, 39))[0] == 0  # the slot stands for more tokens now


def test_failed_rows_leave_no_state() -> None:
    served = Served(limits())
    served.runner.fail = lambda uid: uid == 0
    assert [served.ask(text(0, 39))[0], served.ask(text(1, 39))[0]] == [-1, 0]
    assert served.loop.records.reasons[0] is FinishReason.ERROR
    assert served.scheduler.stats().states_cached == 1
    served.runner.fail = lambda uid: False
    assert [served.ask(text(0, 39))[0], served.ask(text(1, 39))[0]] == [0, 32]


def test_a_row_that_fails_while_it_decodes_leaves_what_its_prompt_has_left() -> None:
    served = Served(limits())
    uid = served.add(text(0, 40), max_tokens=50)
    for _ in range(30):
        served.loop.step()
    served.runner.fail = lambda one: one == uid
    served.loop.run()
    served.runner.fail = lambda one: False
    assert served.loop.records.reasons[uid] is FinishReason.ERROR
    assert served.ask([*text(0, 40), *served.loop.records.tokens[uid]])[0] == 32


def test_a_row_that_fails_before_its_first_fold_does_not_keep_its_own_state() -> None:
    """Its prompt's pages are published, and its slot stands for their end: it might hold anything."""
    served = Served(limits())
    uid = served.add(text(0, 44), max_tokens=50, stable_len=20)
    for _ in range(2):
        served.loop.step()
    served.runner.fail = lambda one: one == uid
    served.loop.run()
    served.runner.fail = lambda one: False
    assert served.loop.records.reasons[uid] is FinishReason.ERROR
    assert served.ask(text(0, 44))[0] == 16


def test_salts_share_no_state() -> None:
    served = Served(limits())
    assert [served.ask(text(0, 40), cache_salt=salt)[0] for salt in ("a", "b", "a", None)] == [0, 0, 32, 0]


def test_vectors_leave_and_find_states() -> None:
    served = Served(limits())
    pooling = PoolingParams(kind="last")
    uids = [served.add(text(0, 40), pooling=pooling)]
    served.loop.run()
    uids.append(served.add(text(0, 40), pooling=pooling))
    served.loop.run()
    assert [served.cached(uid) for uid in uids] == [0, 32]


def test_what_pages_had_and_states_had_not_is_counted() -> None:
    served = Served(limits())
    for turn in range(3):
        served.ask([*text(0, 40), *text(1 + turn, 30)])
    stats = served.scheduler.stats()
    assert (stats.total_state_misses, stats.total_cached_tokens) == (40, 40)
    assert stats.states_free + stats.states_cached == stats.states_total == 40


def test_a_model_without_states_has_none_in_its_plans() -> None:
    served = Served(dataclasses.replace(limits(), num_state_slots=0))
    served.ask(text(0, 40), max_tokens=30)
    for plan in served.runner.plans:
        assert not any(len(array) for array in (plan.fold_rows, plan.fold_sources, plan.fold_targets))
        assert not any(one.state_slot or one.state_source for one in plan.admitted)
        assert not any(chunk.checkpoints for chunk in plan.prefill)
    assert served.scheduler.stats().states_total == 0
