"""What a step computes of images beside decoding rows is bounded in time."""

from __future__ import annotations

from minisgl_backend.scheduler.image_share import BESIDE, ImageShare
from minisgl_backend.step import StepTimes

TIMES = StepTimes(prompts=((0, 0.007), (256, 0.008), (512, 0.0144), (1024, 0.0272)), rows=((16, 0.008),))


def test_without_decoding_rows_or_times_or_in_a_backlog_there_is_no_limit() -> None:
    for share, rows, is_limited in (
        (ImageShare(None), 16, True),
        (ImageShare(TIMES), 0, True),
        (ImageShare(TIMES), 9, False),
    ):
        share.begin(rows, is_limited=is_limited)
        assert (share.prompt_tokens(5000), share.encoding(5000)) == (5000, 5000)
        share.spend(4000, 900)
        assert share.prompt_tokens(5000) == 5000


def test_a_step_becomes_so_much_longer_at_most() -> None:
    share = ImageShare(TIMES)
    share.begin(16, is_limited=True)
    chunk, encoding = share.prompt_tokens(5000), share.encoding(5000)
    token_s = 0.007 / 256  # what a token costs at least
    assert chunk == encoding == int(BESIDE * 0.008 / token_s)
    share.spend(encoding, 0)
    assert share.prompt_tokens(5000) <= 1
    share.spend(encoding, chunk)
    assert (share.prompt_tokens(5000), share.encoding(5000)) == (0, 0)
    share.begin(16, is_limited=True)
    assert share.prompt_tokens(5000) == chunk


def test_something_is_computed_where_a_token_takes_longer() -> None:
    share = ImageShare(StepTimes(prompts=((0, 0.001), (32, 0.1)), rows=((1, 0.001),)))
    share.begin(1, is_limited=True)
    assert share.prompt_tokens(5000) == 32
    share.spend(0, 32)
    assert share.prompt_tokens(5000) == 0
