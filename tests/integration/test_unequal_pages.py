"""Cache groups whose layers differ in the bytes of a token: what an engine does with them beside its usual options."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import save_checkpoint, save_tokenizer


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Of prompts that begin alike, twice, and the number of their tokens that the prefix cache supplied."""
    generator = random.Random(0)
    shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(60)]
    prompts = [shared + [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (9, 30, 50)]
    environment = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None)
    with LLM(str(folder), environment=environment, max_seq_len_override=256, page_size=4, **options) as llm:
        found = [
            output.token_ids
            for _ in range(2)
            for output in llm.generate(prompts, temperature=0.0, max_tokens=40, ignore_eos=True)
        ]
        assert llm.stats.pages_leased == 0
        return found, llm.stats.total_cached_tokens


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma4-small-full", {"kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}),
        (
            "gemma4-large-full",
            {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "dtype": "bfloat16"},
        ),
    ],
    ids=["fp8", "drafts"],
)
def test_answers_are_those_of_one_group_that_keeps_everything(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(name, tmp_path)
    save_tokenizer(tmp_path)
    found, cached = answers(tmp_path, **options)
    assert cached > 0
    monkeypatch.setattr(RuntimeConfig, "most_cache_groups", 1)
    assert answers(tmp_path, **options)[0] == found
