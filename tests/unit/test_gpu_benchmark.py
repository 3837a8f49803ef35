"""What of benchmarks.gpu can be tested without a GPU: its arithmetic, and that its load is the one in the docs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.gpu import busy_and_idle, offline_load, online_load


@pytest.mark.parametrize(("num_pages", "measured"), [(4608, True), (4607, False)])
def test_a_batch_that_does_not_fit_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_pages: int, measured: bool
) -> None:
    """256 sequences of 1,154 tokens are 19 pages of 64 each."""
    monkeypatch.setattr(gpu, "_decode_ms", lambda driver, batch, context: 14.8)
    welcome = SimpleNamespace(page_size=64, num_pages=num_pages + 256)
    row = gpu._decode_row(SimpleNamespace(engine=SimpleNamespace(welcome=welcome)), "q14_bs256_ms", 256)
    assert row == ({"q14_bs256_ms": 14.8} if measured else {})
    assert ("q14_bs256_ms: left out" in capsys.readouterr().err) != measured


def test_overlapping_kernels_count_once():
    assert busy_and_idle([(1, 3), (0, 2), (5, 6), (5, 5.5)]) == (4.0, 2.0)
    assert busy_and_idle([]) == (0.0, 0.0)


def test_offline_load_is_that_of_the_peers():
    load = offline_load()
    assert len(load) == 256
    assert sum(len(prompt) for prompt, _ in load) == 142_827
    assert sum(length for _, length in load) == 133_966


def test_online_loads_have_the_same_lengths_and_no_prompt_in_common():
    first, second = online_load(seed=1), online_load(seed=2)
    assert [(len(prompt), length) for prompt, length in first] == [(len(prompt), length) for prompt, length in second]
    assert not {tuple(prompt[:16]) for prompt, _ in first} & {tuple(prompt[:16]) for prompt, _ in second}
    assert first == online_load(seed=1)
