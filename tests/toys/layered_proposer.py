"""A toy with layers of its own: the model's first ones, read from its folder once more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.proposers.draft_model import DraftModelProposer

NUM_LAYERS = 2


class LayeredProposer(DraftModelProposer):
    """It leaves the model early, and catches up as a draft model does."""

    @classmethod
    def read_draft_model(cls, config: EngineConfig, folder: Path, target: ModelConfig, target_dir: Path) -> ModelConfig:
        others = tuple(f"model.layers.{index}." for index in range(NUM_LAYERS, target.num_layers))
        names = replace(target.tensor_names, left_out=(*target.tensor_names.left_out, *others))
        return replace(target, layers=target.layers[:NUM_LAYERS], tensor_names=names)
