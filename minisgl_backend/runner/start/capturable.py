"""Whether a model's code can be captured into CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from minisgl_backend.runner.graphs.pieces import PiecewiseRunner
from minisgl_backend.runner.graphs.whole import GraphRunner
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.device import is_out_of_memory

log = logging.getLogger(__name__)


def can_be_captured(
    architecture: str,
    runner_with: Callable[..., ModelRunner],
    graphs: GraphRunner | None,
    pieces: PiecewiseRunner | None,
) -> bool:
    """Tries to capture steps of transformers' code, which may do what no graph holds, such as a copy from the host in
    each pass. Warns where that fails.

    `runner_with`: from a number of pages and captures to a runner; graphs, pieces: of one small size each, which are
    closed afterwards; None: nothing of that kind is to be captured.
    """
    try:
        runner_with(1, graphs=graphs, pieces=pieces)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        log.warning(
            "%s runs on transformers' code, which cannot be captured (%s): its steps have no CUDA graphs",
            architecture,
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return False
    finally:
        for one in (graphs, pieces):
            if one is not None:
                one.close()
    return True
