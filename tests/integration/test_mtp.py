"""A checkpoint's layer for further tokens behind the engine: what it drafts is what plain torch drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from tests.gauge.harness import engine
from tests.mtp_checkpoints import Reference, served_mtp_checkpoint
from tests.proposers import proposals_of

MOST = 4
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": MOST}}
# Nothing cached: of a cached prefix the layer may know the last position with another token behind it.
CELL: dict[str, Any] = {
    "max_prefill_length": 24, "page_size": 4, "max_running_requests": 4, "cache_type": "naive",
    "eager_graphs": True, "cuda_graph_max_bs": 8, "cuda_graph_max_tokens": 32,
}  # fmt: skip


def test_drafts_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Behind prompts in chunks, beside other rows, after drafts that were right and wrong; more drafts than layers."""
    model = served_mtp_checkpoint(tmp_path)
    prompts = [[9, 9, 9], [5, 6, 7, 8] * 10, list(range(100, 155))]
    with engine(model=model, **CELL, **MTP) as llm:
        answers = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True, speculative=False)
        texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
        found = proposals_of(llm, texts, MOST)
        again = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True)
        assert [one.token_ids for one in again] == [one.token_ids for one in answers]
        llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
        accepted = llm.stats.speculation.accepted
        assert accepted[0] > accepted[2] > 0
    reference = Reference(tmp_path)
    assert len(found) >= len(prompts)
    for known, proposed in found:
        assert proposed == reference.drafts(reference.states(known[:-1]), known, len(proposed))[0]


def test_models_without_such_a_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config's method 'mtp' cannot propose: Qwen3ForCausalLM has no"):
        engine(**MTP).__enter__()
