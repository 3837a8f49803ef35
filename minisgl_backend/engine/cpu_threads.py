"""How many of a machine's processor cores one rank of a CPU engine computes on."""

from __future__ import annotations

import os

import torch

from minisgl_backend.process.resources import threads_of_rank
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.runtime_config import RuntimeConfig


def share_cores(runtime: RuntimeConfig, runner: ModelRunner) -> None:
    """For the steps of this process, which are the calling thread's, from now on."""
    if runtime.device != "cpu":
        return
    threads = threads_of_rank(runtime.config.ranks_per_node * runtime.config.dp, runner.weight_bytes, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
