"""How many processor cores one rank of a CPU engine computes on."""

from __future__ import annotations

import os

import torch

from minisgl_backend.process.resources import threads_of_rank
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.runtime_config import RuntimeConfig


def share_cores(runtime: RuntimeConfig, runner: ModelRunner) -> None:
    """Sets the number of threads for this process's steps, which the calling thread runs."""
    if runtime.device != "cpu":
        return
    threads = threads_of_rank(runtime.config.ranks_per_node * runtime.config.dp, runner.weight_bytes, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
