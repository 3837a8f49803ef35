"""Captured steps give the tokens of eager ones, whatever the model; on the CPU with the padding and the static buffers
of captured steps, in the same order, without a capture."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minisgl_backend import LLM
from tests.parity.captured import CAPTURED, EAGER, FALLBACK, LIMITS, NATIVE, greedy_tokens, save

# Layers that differ in the size of heads and in the number of KV heads, natively and not; in the number of query heads;
# two attentions a layer; states in slots.
EVERY_RUN = (
    "native gemma4",
    "native qwen3_next",
    "transformers gemma4_text",
    "transformers laguna",
    "transformers diffllama",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERY_RUN else [pytest.mark.full]) for name in (*NATIVE, *FALLBACK)],
)
def test_greedy_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINISGL_EAGER_GRAPHS", "1")
    impl = save(name, tmp_path)
    found = []
    for captures in (EAGER, CAPTURED):
        caplog.clear()
        with caplog.at_level(logging.INFO), LLM(str(tmp_path), model_impl=impl, **LIMITS, **captures) as llm:
            found.append(greedy_tokens(llm))
    assert "graphs up to 4 sequences, in pieces up to 52 tokens" in caplog.text
    assert found[0] == found[1]
