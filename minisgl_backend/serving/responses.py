"""Errors as the models of this project tell them to Triton."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


def error_response(status: str, message: str) -> Any:
    """`status`: one of Triton's codes, by its name in TritonError."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, status)))
