"""Kinds of attention, and entries of their tables of backends: what a backend serves and needs, known without importing
it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from minisgl_backend.attention.base import AttentionBackend
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.needs import AttentionNeeds

WhyMissing = Callable[[str], str | None]  # of a package, or of a MODULE:FUNCTION; None: it works


@dataclass(frozen=True)
class Library:
    """Where a backend's kernels come from."""

    package: str | None  # import name of the package that is needed in addition to torch
    remedy: str  # what to do when it is missing or broken
    kernels: str = ""  # MODULE:FUNCTION, which returns true if its kernels are there; "": always

    def failure(self, missing: WhyMissing) -> str | None:
        """What is wrong with it, as a clause that follows the backend's name."""
        if self.package is not None and (reason := missing(self.package)) is not None:
            return f"needs the package {self.package}, which cannot be imported ({reason})"
        if self.kernels and (reason := missing(self.kernels)) is not None:
            lacking = "that are not there" if self.package is None else f"that the package {self.package} does not have"
            return f"needs kernels {lacking} for this machine ({reason})"
        return None


_SGL_KERNEL = (
    "pip install sgl-kernel, or sglang-kernel where torch is built for CUDA 13 (and, where its import names libnuma, "
    "apt-get install libnuma1)"
)
SGL_KERNEL = Library("sgl_kernel", _SGL_KERNEL, "minisgl_backend.attention.flash_attn_trial:answers")
FLASHINFER = Library(
    "flashinfer",
    "pip install flashinfer-python, and the CUDA toolkit (nvcc) and g++, which compile its kernels, or "
    "flashinfer-jit-cache, which has them",
    "minisgl_backend.attention.flashinfer:prepare_kernels",
)
FLASHMLA = Library(None, _SGL_KERNEL, "minisgl_backend.attention.latent.flashmla:answers")
TRITON = Library("triton", "pip install triton")
TORCH = Library(None, "")


@dataclass(frozen=True, kw_only=True)
class BackendEntry(ABC):
    """What a backend serves and needs."""

    backend: str  # MODULE:CLASS in this package
    library: Library
    needs_gpu: bool = True
    default_page_size: int = 64  # tokens; used when it serves decode and the user set nothing
    page_sizes: tuple[int, ...] | None = None  # tokens; None: any
    half_only: bool = False  # only serves float16 and bfloat16

    prefill_reads_pages: ClassVar[bool] = True  # of sizes in `page_sizes`

    def failure(self, needs: AttentionNeeds, missing: WhyMissing) -> str | None:
        """See `Library`."""
        return self.library.failure(missing)

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Why it cannot serve them; None: it can."""
        if self.half_only and needs.dtype not in ("float16", "bfloat16"):
            return f"serves float16 and bfloat16, not {needs.dtype}"
        return self._refusal(needs)

    @abstractmethod
    def _refusal(self, needs: AttentionNeeds) -> str | None: ...

    def prefill_refusal(self, needs: AttentionNeeds) -> str | None:
        """Why it can only serve decode; None: it serves prefill, too."""
        return None

    def decode_refusal(self, needs: AttentionNeeds) -> str | None:
        """Why it can only serve prefill; None: it serves decode, too."""
        return None

    def load(self) -> type[AttentionBackend]:
        """Raises ImportError."""
        module, _, name = self.backend.partition(":")
        loaded: type[AttentionBackend] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return loaded


class AttentionKind(ABC):
    """What layers attend to (keys and values, latents), with the backends that serve it."""

    backends: ClassVar[Mapping[str, BackendEntry]]
    unserved: ClassVar[str]  # why another kind's backend is none of this one's, as a clause that follows its name

    @abstractmethod
    def preferences(self, needs: AttentionNeeds) -> list[tuple[str, str]]:
        """The (prefill, decode) backends that `auto` tries on this GPU before `triton`, best first."""

    def check(self, needs: AttentionNeeds) -> None:  # noqa: B027
        """Raises ConfigError for what no backend serves."""

    def decode_by_batch(self, needs: AttentionNeeds, decode: str) -> DecodeByBatch | None:
        """Which decode steps another backend is faster at than `decode`; None: none."""
        return None
