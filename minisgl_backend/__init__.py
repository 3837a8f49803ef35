"""Serve large language models on Triton Inference Server: the engine and its Triton door.

Importing this package loads neither torch nor Triton, nor anything else that is installed: names are resolved when
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl_backend.config import EngineConfig

if TYPE_CHECKING:
    from minisgl_backend.llm import LLM, StreamPiece
    from minisgl_backend.request import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Grammar", "SamplingParams", "StreamPiece", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "StreamPiece"):
        from minisgl_backend.process.installed import check_engine_packages

        check_engine_packages()
        from minisgl_backend import llm

        return getattr(llm, name)
    if name in ("Grammar", "SamplingParams"):
        from minisgl_backend import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
