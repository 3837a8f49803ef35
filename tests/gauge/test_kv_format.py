"""The demo model with a KV cache or weights in FP8: its answers are as right, though not always the same."""

from __future__ import annotations

import pytest

from tests.gauge.harness import GREEDY, Gauge, engine
from tests.gauge.test_matrix import MOST_WRONG


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8_e4m3"}, {"quantization": "fp8"}])
def test_fp8_costs_hardly_an_answer(options: dict[str, str], gauge: Gauge) -> None:
    with engine(**options) as llm:
        outputs = llm.chat([question.messages for question in gauge.questions], GREEDY)
    wrong = [
        f"{question.kind}: {question.messages[-1]['content']!r} -> {output.text!r}"
        for question, output in zip(gauge.questions, outputs, strict=True)
        if not question.is_right(output.text)
    ]
    assert len(wrong) <= max(1, MOST_WRONG * len(gauge.questions)), "\n".join(wrong)
