"""What the benchmarks of the engine under load promise, in steps and tokens; times are theirs to report."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import batches, interference, multi_turn

CHUNK = 64


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "sequential"])
def test_streams_flow_beside_a_long_prompt(overlap: bool) -> None:
    options: dict[str, Any] = {"num_pages": 512, "overlap": overlap}
    mixed = interference.measure(3, 600, mixed_prefill_length=CHUNK, **options)
    assert mixed.chunk_steps >= 600 // CHUNK
    assert mixed.longest_wait_steps <= 2
    first = interference.measure(3, 600, mixed_prefill_length=0, max_prefill_length=CHUNK, **options)
    assert first.longest_wait_steps >= 600 // CHUNK, "without mixed steps the streams wait for the whole prompt"


def test_the_radix_cache_saves_most_of_a_conversation() -> None:
    radix, naive = (multi_turn.measure(cache, 3, 4, num_pages=1024) for cache in ("radix", "naive"))
    assert radix.prompt_tokens == naive.prompt_tokens == naive.prefill_tokens
    assert radix.prefill_tokens * 1.5 < naive.prefill_tokens
    assert radix.right == naive.right


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_batch_beside_streams_leaves_them_their_pace() -> None:
    """By processor time of this process: other work on the machine changes it little."""
    found = batches.measure(["--lines", "200"])
    print(found)
    assert found["gap_p99"] <= 1.5, found
    assert found["first_token_p50"] <= 1.3, found
    assert found["batch_speed"] >= 0.4, found
