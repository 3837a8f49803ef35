"""Proposers by the names of their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minisgl_backend.speculation.ngram import NgramProposer
from minisgl_backend.speculation.proposer import DeviceProposals, Proposer
from minisgl_backend.speculative_config import SpeculativeConfig

# Of those that run on the device runner/proposers/create.py has the other half.
PROPOSERS: Mapping[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": lambda config: NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max),
    "draft_model": lambda config: DeviceProposals(catches_up=True),
    "eagle3": lambda config: DeviceProposals(catches_up=False),
    "mtp": lambda config: DeviceProposals(catches_up=False),
}


def create_proposer(config: SpeculativeConfig | None) -> Proposer | None:
    """None where there is no speculation."""
    return None if config is None else PROPOSERS[config.method](config)
