"""What the benchmarks of the engine under load promise, in steps and tokens; times are theirs to report."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import interference, multi_turn

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
