"""Whether a model's code can be captured into CUDA graphs."""

from __future__ import annotations

import logging

from minisgl_backend.runner.model_runner import Captures
from minisgl_backend.runner.start.device import is_out_of_memory
from minisgl_backend.runner.start.parts import Parts

log = logging.getLogger(__name__)


def can_be_captured(architecture: str, parts: Parts, captures: Captures) -> bool:
    """Tries to capture steps of transformers' code, which may do what no graph holds, such as a copy from the host in
    each pass. Warns where that fails.

    `captures`: of one small size each, which are closed afterwards.
    """
    try:
        parts.runner(1, captures)
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
        for one in (captures.graphs, captures.pieces):
            if one is not None:
                one.close()
    return True
