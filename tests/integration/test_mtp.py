"""A checkpoint's layer for further tokens behind the engine: what it drafts is what plain torch drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from tests.gauge.harness import engine
from tests.mtp_checkpoints import Reference, served_mtp_checkpoint
from tests.proposers import proposals_in_answers

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
    with engine(model=model, **CELL, **MTP) as llm:
        found = proposals_in_answers(llm, MOST)
    reference = Reference(tmp_path)
    for known, proposed in found:
        assert proposed == reference.drafts(reference.states(known[:-1]), known, len(proposed))[0]


def test_models_without_such_a_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config's method 'mtp' cannot propose: Qwen3ForCausalLM has no"):
        engine(**MTP).__enter__()
