"""Prepared steps: the inputs of `ModelRunner.execute`."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.attention.pair import PairPlan
from minisgl_backend.runner.step_tensors import HostBatch, StepTensors


@dataclass(frozen=True)
class Batch:
    """A prepared step: tensors on the device and planned attention. Execute it before the next one is prepared."""

    step: StepTensors
    attention: PairPlan | None  # None: the captured graph has its own


@dataclass(frozen=True)
class ProposerBatch:
    """A step of the proposer on the device. Execute it before the next one is prepared."""

    step: StepTensors


@dataclass(frozen=True)
class PromptBatch:
    """A single prompt on the device, whose captured pass is launched before anything else. Execute it before the next
    one is prepared."""

    host: HostBatch


AnyBatch = Batch | ProposerBatch | PromptBatch
