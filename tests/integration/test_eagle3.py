"""An EAGLE-3 head behind the engine: what it drafts is what plain torch drafts from the target's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import find_model_dir
from tests.eagle3_heads import DEMO_LAYERS, eagle3_head, reference_drafts
from tests.gauge.harness import engine
from tests.parity.checkpoints import reference_model
from tests.proposers import proposals_in_answers

MOST = 4
# Nothing cached: of a cached prefix the head may know the last position with another token behind it.
CHUNKED = {"max_prefill_length": 24, "page_size": 4, "max_running_requests": 4, "cache_type": "naive"}
CAPTURED = {"eager_graphs": True, "cuda_graph_max_bs": 8, "cuda_graph_max_tokens": 32}
CELLS: dict[str, dict[str, Any]] = {"chunked": CHUNKED, "captured": {**CHUNKED, **CAPTURED}}


@pytest.mark.parametrize("cell", CELLS)
def test_drafts_are_those_of_plain_torch(cell: str, tmp_path: Path) -> None:
    """Behind prompts in chunks, beside other rows, after drafts that were right and wrong."""
    with engine(**CELLS[cell], **eagle3_head(tmp_path, MOST)) as llm:
        found = proposals_in_answers(llm, MOST)
    target = reference_model(find_model_dir("demo"))
    embedding = target.get_input_embeddings().weight.data
    for known, proposed in found:
        with torch.inference_mode():
            hidden = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in DEMO_LAYERS], dim=-1)
        assert proposed == reference_drafts(tmp_path, states, known, embedding, len(proposed))[0]


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config's model .* cannot propose: .*target's hidden_size"):
        engine(**eagle3_head(tmp_path, MOST, hidden_size=64)).__enter__()
    with pytest.raises(ConfigError, match=r"architectures is .*; allowed: one of LlamaForCausalLMEagle3"):
        engine(speculative_config={"method": "eagle3", "model": "demo"}).__enter__()
