"""A proposer on the device is a file and a row: toys that a test adds change no text, in captured passes neither."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from minisgl_backend import speculative_config
from minisgl_backend.speculative_config import METHODS, Method
from tests.gauge.harness import engine
from tests.proposers import proposals_in_answers, verify_every_draft

MOST = 4
ROWS = {
    "observing": Method(
        meaning="what the model would have said where the last token stood before",
        proposer="tests.toys.observing_proposer:ObservingProposer",
    ),
    "layered": Method(
        meaning="what the model's first layers say",
        proposer="tests.toys.layered_proposer:LayeredProposer",
        catches_up=True,
    ),
}
CHUNKED: dict[str, Any] = {
    "max_prefill_length": 24, "mixed_prefill_length": 24, "page_size": 4, "max_running_requests": 4,
    "cache_type": "naive",
}  # fmt: skip
CAPTURED = {"eager_graphs": True, "cuda_graph_max_bs": 8, "cuda_graph_max_tokens": 32}
PROMPTS = [[9, 9, 9], [5, 6, 7, 8] * 10, list(range(100, 155))]


@pytest.mark.parametrize("method", ROWS)
def test_a_row_adds_a_proposer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative_config, "METHODS", MappingProxyType({**METHODS, **ROWS}))
    config = {"method": method, "num_speculative_tokens": MOST}
    found: list[dict[tuple[int, ...], list[int]]] = []  # in each cell: what is proposed behind which tokens
    for options in (CHUNKED, {**CHUNKED, **CAPTURED}):
        with engine(**options, speculative_config=config) as llm:
            verify_every_draft(llm, MOST)
            for sampling in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 3}):
                asked: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, **sampling}
                plain = llm.generate(PROMPTS, speculative=False, **asked)
                drafted = llm.generate(PROMPTS, **asked)
                assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            assert 0 < sum(llm.stats.speculation.accepted) < sum(llm.stats.speculation.drafted)
            found.append({tuple(known): proposed for known, proposed in proposals_in_answers(llm, MOST)})
    eager, captured = found
    both = eager.keys() & captured.keys()  # steps come together otherwise
    assert len(both) > 3
    assert [eager[known] for known in both] == [captured[known] for known in both]
