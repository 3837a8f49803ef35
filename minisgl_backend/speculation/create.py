"""Proposers by the names of their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minisgl_backend.speculation.ngram import NgramProposer
from minisgl_backend.speculation.proposer import Proposer
from minisgl_backend.speculative_config import SpeculativeConfig

PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": lambda config: NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max),
}


def create_proposer(config: SpeculativeConfig | None) -> Proposer | None:
    """None where there is no speculation."""
    return None if config is None else PROPOSERS[config.method](config)
