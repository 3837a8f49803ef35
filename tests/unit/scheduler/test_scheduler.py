"""The scheduler with a fake runner: what clients hear equals what each request would have produced alone."""

from __future__ import annotations

import random

import pytest

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import LPM_PATIENCE
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import Backlog, Wants
from tests.fakes import FakeRunner, Loop, expected_answer, fake_logprobs, make_request

EOS = (7,)


def limits(**changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "page_size": 4,
        "num_pages": 200,
        "max_seq_len": 200,
        "max_running_requests": 8,
        "max_waiting_requests": 100,
        "max_prefill_length": 64,
        "mixed_prefill_length": 16,
        "eos_token_ids": EOS,
    }
    return SchedulerLimits(**{**values, **changes})  # type: ignore[arg-type]


def make_loop(bounds: SchedulerLimits, overlap: bool = False, check: bool = True) -> Loop:
    return Loop(Scheduler(bounds, seed=0), FakeRunner(bounds), overlap, check)


def random_requests(count: int, seed: int, longest: int = 60, most_tokens: int = 40) -> list[Request]:
    rng = random.Random(seed)
    stems = [[rng.randrange(97) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randrange(longest // 2)]
        prompt = stem + [rng.randrange(97) for _ in range(rng.randrange(1, longest - len(stem)))]
        params: dict[str, object] = {"max_tokens": rng.randrange(1, most_tokens), "n": rng.choice([1, 1, 1, 3])}
        if rng.random() < 0.3:
            params["ignore_eos"] = True
        if rng.random() < 0.3:
            params["stop_token_ids"] = tuple(rng.randrange(97) for _ in range(rng.randrange(1, 9)))
        if rng.random() < 0.3:
            params["min_tokens"] = rng.randrange(int(params["max_tokens"]) + 1)  # type: ignore[call-overload]
        requests.append(make_request(index * 10, prompt, **params))
    return requests


def assert_same_as_alone(loop: Loop, requests: list[Request], max_length: int) -> None:
    for request in requests:
        answer, reason = expected_answer(request, max_length, EOS)
        for uid in range(request.uid, request.uid + request.params.n):
            assert loop.records.tokens[uid] == answer
            assert loop.records.reasons[uid] == reason


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_answers_are_those_of_each_request_alone(page_size: int, cache_type: str, overlap: bool) -> None:
    bounds = limits(page_size=page_size, num_pages=800 // page_size, cache_type=cache_type)
    loop = make_loop(bounds, overlap)
    requests = random_requests(20, seed=page_size)
    for request in requests:
        loop.scheduler.add(request)
    loop.run()
    assert_same_as_alone(loop, requests, 200)
    assert loop.scheduler.stats().pages_leased == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("most", "mixed"), [(16, 16), (16, 0), (64, 5), (4096, 512), (4096, 0), (1, 1)])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_budgets_and_policies_change_no_answer(policy: str, most: int, mixed: int, overlap: bool) -> None:
    bounds = limits(schedule_policy=policy, max_prefill_length=most, mixed_prefill_length=mixed)
    loop = make_loop(bounds, overlap)
    requests = random_requests(12, seed=most + mixed)
    for request in requests:
        loop.scheduler.add(request)
        loop.step()
    loop.run()
    assert_same_as_alone(loop, requests, 200)
    for plan in loop.runner.plans:
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        assert prompt_tokens <= (min(mixed, most) if len(plan.decode_rows) else most)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("most", "mixed"), [(16, 16), (18, 0), (64, 5), (64, 1), (4096, 30)])
def test_chunks_end_with_pages_where_a_model_needs_it(most: int, mixed: int, overlap: bool) -> None:
    """Each step's first prompt goes on by a page at least, however small the budget."""
    bounds = limits(chunk_multiple=4, max_prefill_length=most, mixed_prefill_length=mixed, num_pages=60)
    loop = make_loop(bounds, overlap)
    requests = random_requests(12, seed=most + mixed)
    for request in requests:
        loop.scheduler.add(request)
        loop.step()
    loop.run()
    assert_same_as_alone(loop, requests, 200)
    for plan in loop.runner.plans:
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        assert prompt_tokens <= max(4, min(mixed, most) if len(plan.decode_rows) else most)


@pytest.mark.parametrize(
    ("page_size", "priority", "expected"),
    [(1, 0, [[64, 100], [60]]), (16, 0, [[64, 96], [64]]), (128, 0, [[64], [160]]), (128, 9, [[64], [160]])],
)
def test_a_later_chunk_is_cut_to_whole_pages_or_left_out(
    page_size: int, priority: int, expected: list[list[int]]
) -> None:
    """Prompts of 64 and 160 tokens in steps of 164, in each of which 100 are left for the second."""
    loop = make_loop(limits(page_size=page_size, chunk_multiple=page_size, max_prefill_length=164, num_pages=400))
    for uid, length in enumerate((64, 160)):
        loop.scheduler.add(make_request(uid, [uid] * length, max_tokens=1, priority=priority))
    loop.run()
    assert [[len(chunk.token_ids) for chunk in plan.prefill] for plan in loop.runner.plans] == expected


@pytest.mark.parametrize(("mixed", "expected"), [(384, 381), (300, 253), (256, 253), (250, 250), (200, 200)])
def test_mixed_steps_fill_the_tiles_of_a_gpu(mixed: int, expected: int) -> None:
    """Three streams and a long prompt: together a multiple of 128 tokens, where that is worth it."""
    chunks = chunks_beside_streams(2501, mixed_prefill_length=mixed)
    full, rest = divmod(2501, expected)
    assert chunks == [*[expected] * full, rest]


@pytest.mark.parametrize(
    ("mixed", "expected"),
    [(300, 253), (500, 381), (764, 509), (765, 765), (1500, 765), (1700, 1661), (2045, 2045), (2200, 2173)],
)
def test_long_mixed_steps_are_cut_to_what_is_captured(mixed: int, expected: int) -> None:
    """Three streams and a long prompt; beyond the sizes, and where one would cost half of the budget, whole tiles."""
    chunks = chunks_beside_streams(8000, mixed_prefill_length=mixed, sparse_step_sizes=(512, 768, 2048))
    assert chunks[0] == expected


def chunks_beside_streams(prompt_len: int, **changes: object) -> list[int]:
    """The chunks of a prompt beside three streams."""
    loop = make_loop(limits(num_pages=3000, max_seq_len=9000, max_prefill_length=8000, tile_tokens=128, **changes))
    for uid in range(3):
        loop.scheduler.add(make_request(uid, [uid], max_tokens=40, ignore_eos=True))
    loop.step()
    loop.scheduler.add(make_request(3, [1] * prompt_len, max_tokens=1))
    loop.run()
    return [len(plan.prefill[0].token_ids) for plan in loop.runner.plans if plan.prefill and len(plan.decode_rows)]


def test_a_backlog_of_prompts_gets_larger_chunks() -> None:
    """One stream, then prompts of 40 tokens: more than 100 waiting tokens are a backlog, until all have begun."""
    backlog = Backlog(waiting_tokens=100, mixed_prefill_length=80, most_prefill_length=240)
    loop = make_loop(limits(num_pages=1000, mixed_prefill_length=20, max_prefill_length=2048, backlog=backlog))
    loop.scheduler.add(make_request(0, [0], max_tokens=60, ignore_eos=True))
    loop.step()
    for uid in range(1, 6):
        loop.scheduler.add(make_request(uid, [uid] * 40, max_tokens=1))
    loop.run()
    mixed = [plan for plan in loop.runner.plans if plan.prefill and len(plan.decode_rows)]
    assert [sum(len(chunk.token_ids) for chunk in plan.prefill) for plan in mixed] == [80, 80, 40]
    assert not loop.scheduler.plan()


def test_in_a_deep_backlog_chunks_grow_with_what_waits() -> None:
    """One stream, then 32 prompts of 25 tokens: whole ones within a third of what waits and 75 tokens."""
    backlog = Backlog(waiting_tokens=100, mixed_prefill_length=25, most_prefill_length=75)
    loop = make_loop(limits(num_pages=1000, mixed_prefill_length=10, max_prefill_length=2048, backlog=backlog))
    loop.scheduler.add(make_request(0, [0], max_tokens=60, ignore_eos=True))
    loop.step()
    for uid in range(1, 33):
        loop.scheduler.add(make_request(uid, [uid] * 25, max_tokens=1))
    loop.run()
    mixed = [plan for plan in loop.runner.plans if plan.prefill and len(plan.decode_rows)]
    tokens = [sum(len(chunk.token_ids) for chunk in plan.prefill) for plan in mixed]
    assert tokens == [75] * 8 + [50] * 2 + [25] * 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_starvation_preempts_and_changes_no_answer(page_size: int, cache_type: str, overlap: bool) -> None:
    """Pages for 3 full sequences, 32 requests."""
    bounds = limits(
        page_size=page_size,
        num_pages=3 * 96 // page_size,
        max_seq_len=96,
        max_running_requests=32,
        cache_type=cache_type,
    )
    loop = make_loop(bounds, overlap)
    requests = [
        make_request(uid, [uid, *range(uid % 5, 20 + uid % 7)], ignore_eos=True, max_tokens=None if uid % 3 else 60)
        for uid in range(32)
    ]
    for request in requests:
        loop.scheduler.add(request)
    loop.run()
    assert_same_as_alone(loop, requests, 96)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_continues_with_the_same_output(overlap: bool) -> None:
    bounds = limits(num_pages=12, max_seq_len=40, max_running_requests=4)
    loop = make_loop(bounds, overlap)
    stop = (50,)
    requests = [make_request(uid, [uid + 1] * 9, stop_token_ids=stop, max_tokens=30) for uid in range(4)]
    for request in requests:
        loop.scheduler.add(request)
    # Short answers first: the estimate expects more of them, is wrong, and has to preempt.
    for _ in range(200):
        loop.scheduler._admission.saw_answer(1)
    loop.run()
    assert_same_as_alone(loop, requests, 40)
    assert loop.scheduler.stats().total_preempted > 0
    details = [detail for uid in range(4) for detail in loop.records.details[uid] if detail.cached_tokens is not None]
    assert len(details) == 4  # told once, with the first token


def test_streams_flow_while_a_long_prompt_is_read() -> None:
    loop = make_loop(limits(num_pages=500, max_seq_len=1000, mixed_prefill_length=16))
    loop.scheduler.add(make_request(1, [3, 4, 5], ignore_eos=True, max_tokens=60))
    loop.step()
    loop.scheduler.add(make_request(2, [1] * 700, max_tokens=2))
    for _ in range(40):
        before = len(loop.records.tokens[1])
        loop.step()
        assert len(loop.records.tokens[1]) == before + 1
    assert loop.runner.plans[-1].prefill


def test_equal_prompts_share_pages_and_report_them() -> None:
    loop = make_loop(limits())
    prompt = list(range(30))
    loop.scheduler.add(make_request(1, prompt, max_tokens=1))
    loop.run()
    loop.scheduler.add(make_request(2, prompt, max_tokens=1))
    loop.run()
    assert loop.records.details[1][0].cached_tokens == 0
    assert loop.records.details[2][0].cached_tokens == 28
    stats = loop.scheduler.stats()
    assert (stats.total_prompt_tokens, stats.total_cached_tokens) == (60, 28)
    assert loop.runner.computed_tokens == 32


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    loop = make_loop(limits())
    prompt = list(range(32))
    for uid in (1, 2):
        loop.scheduler.add(make_request(uid, prompt, max_tokens=1))
        loop.run()
    assert loop.records.details[2][0].cached_tokens == 28


@pytest.mark.parametrize("overlap", [False, True])
def test_sequences_of_one_request_compute_the_prompt_once(overlap: bool) -> None:
    loop = make_loop(limits(), overlap)
    loop.scheduler.add(make_request(1, list(range(41)), n=5, max_tokens=1))
    loop.run()
    assert loop.runner.computed_tokens == 41 + 4
    assert len({tuple(loop.records.tokens[uid]) for uid in range(1, 6)}) == 1
    seeds = {admitted.params.seed for plan in loop.runner.plans for admitted in plan.admitted}
    assert len(seeds) == 5


def test_siblings_go_on_when_their_leader_is_aborted() -> None:
    loop = make_loop(limits())
    loop.scheduler.add(make_request(1, list(range(100)), n=3, max_tokens=4, prompt_logprobs=0))
    loop.step()
    loop.scheduler.abort(1)
    loop.run()
    assert loop.records.reasons == {1: FinishReason.CANCELLED, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert len(loop.records.details[2][0].prompt_logprobs) == 99
    assert 3 not in loop.records.details, "what is known of a prompt is told once"


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("prompt_tokens", [3, 100])
def test_what_is_known_of_a_prompt_is_told_and_counted_once(prompt_tokens: int, cache_type: str) -> None:
    """By the first of its sequences, whether or not the others share its pages."""
    loop = make_loop(limits(cache_type=cache_type))
    prompt = list(range(prompt_tokens))
    loop.scheduler.add(make_request(1, prompt, n=4, max_tokens=3, prompt_logprobs=0))
    loop.run()
    assert list(loop.records.details) == [1]
    assert [len(detail.prompt_logprobs) for detail in loop.records.details[1]] == [prompt_tokens - 1]
    assert loop.records.details[1][0].cached_tokens == 0
    stats = loop.scheduler.stats()
    assert (stats.total_prompt_tokens, stats.total_cached_tokens) == (prompt_tokens, 0)
    asked = {chunk.row for plan in loop.runner.plans for chunk in plan.prefill if chunk.wants & Wants.PROMPT_LOGPROBS}
    assert len(asked) == 1, "computed by one sequence alone"


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_come_with_their_tokens(overlap: bool) -> None:
    loop = make_loop(limits(mixed_prefill_length=8, max_prefill_length=8), overlap)
    prompt = [5, 4, 3, 2, 1] * 4
    loop.scheduler.add(make_request(1, prompt, logprobs=0, prompt_logprobs=2, max_tokens=6, ignore_eos=True))
    loop.scheduler.add(make_request(2, [9, 9], max_tokens=5, ignore_eos=True))
    loop.scheduler.add(make_request(3, prompt, logprobs=3, max_tokens=9, ignore_eos=True))
    loop.run()
    for uid in (1, 3):
        told = [detail.logprobs for detail in loop.records.details[uid]]
        assert told == [fake_logprobs(20 + at, token) for at, token in enumerate(loop.records.tokens[uid])]
    first = loop.records.details[1][0]
    assert first.prompt_logprobs == tuple(fake_logprobs(at, token) for at, token in enumerate(prompt) if at)
    assert first.cached_tokens == 0
    assert all(detail.logprobs is None for detail in loop.records.details[2])


def test_urgent_requests_run_first_and_are_preempted_last() -> None:
    bounds = limits(max_running_requests=1)
    loop = make_loop(bounds)
    for uid, priority in ((1, 0), (2, 9), (3, 1), (4, 0)):
        loop.scheduler.add(make_request(uid, [uid], max_tokens=1, ignore_eos=True, priority=priority))
    loop.run()
    assert [admitted.uid for plan in loop.runner.plans for admitted in plan.admitted] == [3, 1, 4, 2]


def test_requests_with_different_salts_share_no_page() -> None:
    loop, prompt = make_loop(limits(schedule_policy="lpm")), list(range(20))
    for uid, salt in enumerate([None, "a", "b", "a", None, "c"], 1):
        loop.scheduler.add(make_request(uid, prompt, max_tokens=1, cache_salt=salt))
        loop.run()
        loop.scheduler.check()
    told = [loop.records.details[uid][0].cached_tokens for uid in range(1, 7)]
    assert [count > 0 for count in told] == [False, False, False, True, True, False]


def test_longest_cached_prefix_goes_first() -> None:
    bounds = limits(max_running_requests=1, schedule_policy="lpm")
    loop = make_loop(bounds)
    loop.scheduler.add(make_request(1, list(range(40)), max_tokens=1))
    loop.run()
    loop.scheduler.add(make_request(2, [9] * 40, max_tokens=1))
    loop.scheduler.add(make_request(3, [*range(12), 0], max_tokens=1))
    loop.scheduler.add(make_request(4, [*range(24), 0], max_tokens=1))
    loop.run()
    assert [admitted.uid for plan in loop.runner.plans for admitted in plan.admitted] == [1, 4, 3, 2]


def test_cached_prefixes_overtake_nobody_for_ever() -> None:
    """A prompt of which nothing is cached, and shorter than what is cached of all that come after it."""
    loop = make_loop(limits(max_running_requests=1, schedule_policy="lpm"))
    loop.scheduler.add(make_request(0, list(range(40)), max_tokens=1))
    loop.run()
    for uid in (1, 2):
        loop.scheduler.add(make_request(uid, [*range(36), uid], max_tokens=1, ignore_eos=True))
    loop.scheduler.add(make_request(10_000, [90, 91, 92], max_tokens=1, ignore_eos=True))
    for uid in range(3, LPM_PATIENCE + 10):
        loop.scheduler.add(make_request(uid, [*range(36), uid % 90], max_tokens=1, ignore_eos=True))
        loop.step()
    order = [admitted.uid for plan in loop.runner.plans for admitted in plan.admitted]
    assert LPM_PATIENCE <= order.index(10_000) <= LPM_PATIENCE + 3


def test_deadlines_end_waiting_and_running_sequences() -> None:
    now = [0.0]
    bounds = limits(max_running_requests=1)
    scheduler = Scheduler(bounds, clock=lambda: now[0])
    loop = Loop(scheduler, FakeRunner(bounds), overlap=True)
    scheduler.add(make_request(1, [1], ignore_eos=True, deadline=5.0))
    scheduler.add(make_request(2, [2], ignore_eos=True, deadline=4.0))
    scheduler.add(make_request(3, [3], ignore_eos=True, max_tokens=3))
    for _ in range(3):
        loop.step()
    now[0] = 6.0
    loop.run()
    assert loop.records.reasons == {1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED, 3: FinishReason.LENGTH}
    assert 2 not in loop.records.tokens
    assert scheduler.stats().total_cancelled == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_rows_end_with_an_error_and_leave_nothing_in_the_cache(overlap: bool) -> None:
    loop = make_loop(limits(), overlap)
    loop.runner.fail = lambda uid: uid == 1
    loop.scheduler.add(make_request(1, list(range(20)), max_tokens=5))
    loop.scheduler.add(make_request(2, [9] * 20, max_tokens=5, ignore_eos=True))
    loop.run()
    assert loop.records.reasons == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert "NaN or infinite logits" in loop.records.details[1][-1].error
    loop.runner.fail = lambda uid: False
    loop.scheduler.add(make_request(3, list(range(20)), max_tokens=1))
    loop.run()
    assert loop.records.details[3][0].cached_tokens == 0
    assert loop.scheduler.stats().total_failed == 1


def test_what_can_never_run_is_refused_with_the_limit() -> None:
    scheduler = Scheduler(limits(max_waiting_requests=2, num_pages=10))
    with pytest.raises(InvalidRequestError, match=r"40 tokens; this model takes prompts of at most 39.*num_pages"):
        scheduler.add(make_request(1, [1] * 40))
    with pytest.raises(
        InvalidRequestError, match=r"200 tokens; this model takes prompts of at most 199.*max_seq_len_override"
    ):
        Scheduler(limits()).add(make_request(1, [1] * 200))
    with pytest.raises(InvalidRequestError, match="is empty"):
        scheduler.add(make_request(1, []))
    with pytest.raises(InvalidRequestError, match="token id -3"):
        scheduler.add(make_request(1, [1, -3]))
    scheduler.add(make_request(1, [1], n=4))
    with pytest.raises(InvalidRequestError, match="uid is 2"):
        scheduler.add(make_request(2, [1]))
    scheduler.add(make_request(9, [1]))
    with pytest.raises(CapacityError, match="max_waiting_requests"):
        scheduler.add(make_request(10, [1]))
    scheduler.plan()
    scheduler.add(make_request(10, [1]))


def test_a_full_queue_counts_requests_not_sequences() -> None:
    loop = make_loop(limits(max_waiting_requests=2, max_running_requests=1))
    loop.scheduler.add(make_request(1, [1] * 20, n=3, max_tokens=2))
    loop.scheduler.add(make_request(5, [1] * 20, n=3, max_tokens=2))
    loop.scheduler.abort(5)  # its siblings still wait
    with pytest.raises(CapacityError):
        loop.scheduler.add(make_request(9, [1]))
    loop.scheduler.check()
    loop.run()
    loop.scheduler.add(make_request(9, [1]))


def test_huge_parameters_do_no_harm() -> None:
    loop = make_loop(limits(max_seq_len=20))
    loop.scheduler.add(make_request(1, [1], max_tokens=2**62, min_tokens=2**62, stop_token_ids=(2**40, -7)))
    loop.run()
    assert loop.records.reasons == {1: FinishReason.LENGTH}


def test_the_context_limit_ends_a_sequence() -> None:
    loop = make_loop(limits(max_seq_len=20))
    loop.scheduler.add(make_request(1, [1] * 19, ignore_eos=True))
    loop.scheduler.add(make_request(2, [1] * 10, ignore_eos=True))
    loop.run()
    assert [len(loop.records.tokens[uid]) for uid in (1, 2)] == [1, 10]
    assert set(loop.records.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_tell_once_and_free_everything(overlap: bool) -> None:
    loop = make_loop(limits(max_running_requests=2), overlap)
    for uid in range(4):
        loop.scheduler.add(make_request(uid, [uid] * 30, ignore_eos=True))
    for _ in range(6):
        loop.step()
    for uid in (0, 0, 1, 2, 3, 77):
        loop.scheduler.abort(uid, FinishReason.STOP)
    loop.run()
    assert loop.records.reasons == dict.fromkeys(range(4), FinishReason.STOP)
    stats = loop.scheduler.stats()
    assert (stats.pages_leased, stats.total_finished, stats.num_running, stats.num_waiting) == (0, 4, 0, 0)


def test_steps_are_committed_in_order_with_their_own_result() -> None:
    bounds = limits()
    scheduler, runner = Scheduler(bounds), FakeRunner(bounds)
    scheduler.add(make_request(1, [1], ignore_eos=True))
    first = scheduler.plan()
    assert first is not None
    result = runner.execute(first).result()
    second = scheduler.plan()
    assert second is not None
    with pytest.raises(RuntimeError, match="cannot be committed"):
        scheduler.commit(second, result)
    scheduler.commit(first, result)
