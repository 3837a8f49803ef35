"""What a step computes of images beside decoding rows is bounded in time."""

from __future__ import annotations

from minisgl_backend.scheduler.image_share import BESIDE, EVERY, LONG_S, ImageShare
from minisgl_backend.scheduler.step_estimate import StepEstimate
from minisgl_backend.step import StepTimes

TIMES = StepTimes(prompts=((0, 0.007), (256, 0.008), (512, 0.0144), (1024, 0.0272)), rows=((16, 0.008),))


def test_without_decoding_rows_or_times_or_in_a_backlog_there_is_no_limit() -> None:
    for share, rows, is_limited in (
        (ImageShare(None), 16, True),
        (ImageShare(StepEstimate(TIMES)), 0, True),
        (ImageShare(StepEstimate(TIMES)), 9, False),
    ):
        share.begin(0, rows, is_limited=is_limited)
        assert (share.prompt_tokens(5000, 0), share.encoding(5000)) == (5000, 5000)
        share.spend(4000, 900, 0)
        assert share.prompt_tokens(5000, 0) == 5000


def test_a_step_becomes_so_much_longer_at_most() -> None:
    share = ImageShare(StepEstimate(TIMES))
    share.begin(0, 16, is_limited=True)
    chunk, encoding = share.prompt_tokens(5000, 0), share.encoding(5000)
    token_s = 0.007 / 256  # what a token costs at least
    assert encoding == int(BESIDE * 0.008 / token_s)
    # The first 256 tokens take a millisecond, those behind them 25 us each.
    assert chunk == 256 + int((BESIDE * 0.008 - 0.001) / 25e-6)
    share.spend(encoding, 0, 0)
    assert share.prompt_tokens(5000, 0) <= 7
    share.spend(encoding, chunk, 0)
    assert (share.prompt_tokens(5000, 0), share.encoding(5000)) == (0, 0)
    share.begin(0, 16, is_limited=True)
    assert share.prompt_tokens(5000, 0) == chunk


def test_something_is_computed_where_a_token_takes_longer() -> None:
    share = ImageShare(StepEstimate(StepTimes(prompts=((0, 0.001), (32, 0.1)), rows=((1, 0.001),))))
    share.begin(0, 1, is_limited=True)
    assert (share.prompt_tokens(5000, 0), share.encoding(5000)) == (32, 1)
    share.spend(0, 32, 0)
    assert (share.prompt_tokens(5000, 0), share.encoding(5000)) == (0, 0)


def test_what_a_chunk_attends_to_counts() -> None:
    share = ImageShare(StepEstimate(TIMES), context_cost=1e-4)
    chunks = []
    for start in (0, 1000, 10_000, 1_000_000):
        share.begin(0, 16, is_limited=True)
        chunks.append(share.prompt_tokens(5000, start))
        share.spend(0, chunks[-1], start)
        assert share.prompt_tokens(5000, start) <= 4, "the first tokens are nearly free"
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[2] * 10_000 * 1e-4 * 25e-6 < BESIDE * 0.008
    assert chunks[3] == 32


def test_one_of_many_steps_may_be_long() -> None:
    share, taken = ImageShare(StepEstimate(TIMES), context_cost=1e-4), []
    for step in range(10 * EVERY):
        share.begin(step, 16, is_limited=True)
        if tokens := share.long_chunk(50_000, 1000):
            share.begin_long()
            assert share.prompt_tokens(tokens, 1000) == tokens
            share.spend(0, tokens, 1000)
            taken.append((step, tokens))
    assert [step for step, _ in taken[:5]] == [0, 1, 2, 3, EVERY], "four are saved while nothing is long"
    assert len(taken) <= 10 + 4
    assert all(0.8 * LONG_S < tokens * 25e-6 < LONG_S for _, tokens in taken)
    share.begin(10 * EVERY, 0, is_limited=True)
    assert share.long_chunk(50_000, 1000) == 0, "without streams no step is too long"
