"""Registry of attention backends: which to use on which machine, what each needs, and their page size.

Backends are imported only when they are chosen, so a missing package only matters to users of its backend.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from minisgl_backend.attention.backend_entry import PLAIN_SCORES, BackendEntry, Scores
from minisgl_backend.attention.base import AttentionBackend, AttentionSpec
from minisgl_backend.attention.by_step import BackendByStep
from minisgl_backend.attention.few_rows import FewRows
from minisgl_backend.attention.latent_entry import LatentEntry
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import FP8_E4M3

_SGL_KERNEL = (
    "pip install sgl-kernel, or sglang-kernel where torch is built for CUDA 13 (and, where its import names libnuma, "
    "apt-get install libnuma1)"
)
_FLASHINFER = (
    "pip install flashinfer-python, and the CUDA toolkit (nvcc) and g++, which compile its kernels, or "
    "flashinfer-jit-cache, which has them"
)
_FLASHINFER_KERNELS = "minisgl_backend.attention.flashinfer:prepare_kernels"

# Default page sizes: measured ones: docs/performance.md. On CPU 16 keeps gathered chunks large
# enough to copy fast and wastes little of a short sequence's last page.
BACKENDS: Mapping[str, BackendEntry] = MappingProxyType(
    {
        "fa": BackendEntry(
            module="flash_attn",
            class_name="FlashAttentionBackend",
            package="sgl_kernel",
            remedy=_SGL_KERNEL,
            device="cuda",
            default_page_size=64,
            kernels="minisgl_backend.attention.flash_attn_trial:answers",
            fp8_capabilities=range(90, 100),
            half_only=True,
            head_multiple=8,
            largest_head=256,
            soft_caps=True,
            sinks=True,
            sink_kernels="minisgl_backend.attention.flash_attn:serves_sinks",
            latents=LatentEntry(
                module="latent_fa",
                class_name="FlashAttentionLatentBackend",
                sizes=((512, 64),),
                capabilities=range(90, 100),
                kernels="minisgl_backend.attention.flash_attn_trial:answers",
            ),
        ),
        "fi": BackendEntry(
            module="flashinfer",
            class_name="FlashInferBackend",
            package="flashinfer",
            remedy=_FLASHINFER,
            device="cuda",
            default_page_size=64,
            kernels=_FLASHINFER_KERNELS,
            half_only=True,
            head_sizes=(64, 128, 256),
            fp8_capabilities=range(80, 1000),
            soft_caps=True,
            latents=LatentEntry(
                module="latent_fi",
                class_name="FlashInferLatentBackend",
                sizes=((512, 64),),
                capabilities=range(80, 1000),
                kernels=_FLASHINFER_KERNELS,
            ),
        ),
        "trtllm": BackendEntry(
            module="trtllm",
            class_name="TrtllmBackend",
            package="flashinfer",
            remedy=_FLASHINFER,
            device="cuda",
            default_page_size=64,
            kernels=_FLASHINFER_KERNELS,
            page_sizes=(16, 32, 64),
            fp8_capabilities=range(90, 100),  # the kernels of later GPUs need the queries in FP8, too
            prefill_capability=100,
            prefill_hint="fa,trtllm or triton,trtllm",
            half_only=True,
            head_sizes=(64, 128, 256),
        ),
        "triton": BackendEntry(
            module="triton_attn",
            class_name="TritonBackend",
            package="triton",
            remedy="pip install triton",
            device="cuda",
            default_page_size=64,
            largest_head=256,
            any_kv=True,
            fp8_capabilities=range(89, 1000),  # GPUs that convert FP8 numbers
            soft_caps=True,
            sinks=True,
            chunks=True,
            latents=LatentEntry(
                module="latent_triton", class_name="TritonLatentBackend", fp8_capabilities=range(89, 1000)
            ),
        ),
        "flashmla": BackendEntry(
            module="flashmla",
            class_name="FlashMLABackend",
            package=None,
            remedy=_SGL_KERNEL,
            device="cuda",
            default_page_size=64,
            half_only=True,
            only_latents=True,
            latents=LatentEntry(
                module="flashmla",
                class_name="FlashMLABackend",
                page_sizes=(64,),
                sizes=((512, 64),),
                capabilities=range(90, 100),
                kernels="minisgl_backend.attention.flashmla:answers",
            ),
        ),
        "torch": BackendEntry(
            module="reference",
            class_name="TorchBackend",
            package=None,
            remedy="",
            device=None,
            default_page_size=16,
            any_kv=True,
            soft_caps=True,
            sinks=True,
            chunks=True,
            latents=LatentEntry(
                module="latent_reference", class_name="TorchLatentBackend", fp8_capabilities=range(1000)
            ),
        ),
    }
)


@dataclass(frozen=True)
class AttentionChoice:
    """`attention_backend` and `page_size` resolved for one machine."""

    prefill: str
    decode: str
    page_size: int  # tokens
    warnings: tuple[str, ...]  # for the log
    few_rows: FewRows | None = None  # None: `decode` serves all batch sizes


# Decode over latents on Hopper (docs/performance.md): FlashMLA's tiles have rows for this many query heads; with more,
# FlashAttention is faster. At small batch sizes `triton` is the fastest; keys are maximum numbers of query heads.
FLASHMLA_HEADS = 64
FEW_LATENT_ROWS: Mapping[float, FewRows] = MappingProxyType(
    {
        16: FewRows("triton", ((2, math.inf), (4, 8192), (8, 2800))),
        32: FewRows("triton", ((1, math.inf), (2, 9000), (4, 2800))),
        math.inf: FewRows("triton", ((1, 8192), (2, 2800))),
    }
)


def choose_attention(
    requested: str,
    page_size: int | None,
    *,
    compute_capability: int | None,
    head_dims: Sequence[int] = (128,),
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    scores: Scores = PLAIN_SCORES,
    latents: tuple[int, int] | None = None,
    num_q_heads: int | None = None,
    why_missing: Callable[[str], str | None] | None = None,
) -> AttentionChoice:
    """Resolves the two options. Imports the packages that it considers, and nothing on CPU.

    `compute_capability` is 10 * major + minor of the GPU, None on CPU; `head_dims`, `dtype` and `scores` are the
    model's, as is `latents`, kv_lora_rank and qk_rope_head_dim with latents (MLA); `num_q_heads` are those of a rank,
    None: few. `kv_dtype` is that of the KV cache, None: `dtype`.
    `why_missing(name)` returns None for a package, or a MODULE:FUNCTION, that works, else the reason. Raises
    ConfigError for a requested backend that cannot run here.
    """
    missing, kv_dtype = why_missing or import_failure, kv_dtype or dtype
    if latents is not None and kv_dtype not in (dtype, FP8_E4M3):
        allowed = f"auto, {dtype} or fp8_e4m3"
        raise ConfigError(f"kv_cache_dtype is {kv_dtype!r}; allowed for a model that keeps latents (MLA): {allowed}")
    needs = (dtype, kv_dtype, compute_capability, scores, latents)
    few_rows = None
    if requested == "auto":
        prefill, decode, warnings = _automatic(head_dims, *needs, missing, num_q_heads or 1)
        if latents is not None and decode in ("flashmla", "fa") and missing("triton") is None:
            few_rows = next(few for heads, few in FEW_LATENT_ROWS.items() if (num_q_heads or 1) <= heads)
    else:
        prefill, decode = _named(requested, compute_capability, scores, latents, missing)
        for name in (prefill, decode):
            refusal = _refusal(BACKENDS[name], head_dims, *needs)
            if refusal is None and name == decode and latents is not None and kv_dtype == FP8_E4M3:
                refusal = _fp8_latents_refusal(name, compute_capability)
            if refusal is not None:
                raise ConfigError(f"attention_backend is {requested!r}, but {name} {refusal}; use triton or torch")
        warnings = []
    size, size_warnings = _page_size(prefill, decode, page_size, latents is not None)
    return AttentionChoice(prefill, decode, size, (*warnings, *size_warnings), few_rows)


def create_attention(prefill: str, decode: str, spec: AttentionSpec, few_rows: FewRows | None = None) -> AttentionPair:
    """The backends of both parts of a step for each group; one object serves both if the names are the same. few_rows:
    see `AttentionChoice`."""
    prefill_backends = _create(prefill, spec)
    decode_backends = prefill_backends if decode == prefill else _create(decode, spec)
    if few_rows is not None:
        pairs = zip(_create(few_rows.backend, spec), decode_backends, strict=True)
        decode_backends = [BackendByStep(few, more, few_rows) for few, more in pairs]
    return AttentionPair(spec, prefill_backends, decode_backends)


def import_failure(name: str) -> str | None:
    """Why a package cannot be imported, or why MODULE:FUNCTION does not return true; None: nothing is wrong.

    Compiled packages fail in many ways, so all exceptions are caught.
    """
    module, _, function = name.partition(":")
    try:
        imported = importlib.import_module(module)
        usable = not function or getattr(imported, function)()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None if usable else f"{function}() says no"


def _why_unusable(
    entry: BackendEntry, scores: Scores, latents: tuple[int, int] | None, missing: Callable[[str], str | None]
) -> str | None:
    """What is wrong with the package of a backend, as a clause that follows its name."""
    if entry.package is not None and (reason := missing(entry.package)) is not None:
        return f"needs the package {entry.package}, which cannot be imported ({reason})"
    kernels = entry.latents.kernels if latents is not None and entry.latents is not None else entry.kernels
    if kernels and (reason := missing(kernels)) is not None:
        package = "that are not there" if entry.package is None else f"that the package {entry.package} does not have"
        return f"needs kernels {package} for this machine ({reason})"
    if scores.sinks and entry.sink_kernels and (reason := missing(entry.sink_kernels)) is not None:
        return f"needs kernels with attention sinks, which this version of {entry.package} does not have ({reason})"
    return None


def _refusal(entry: BackendEntry, head_dims: Sequence[int], *needs: Any) -> str | None:
    """Why it cannot serve layers with all of these head sizes. needs: further arguments of `BackendEntry.refusal`."""
    refusals = (entry.refusal(size, *needs) for size in head_dims)
    return next((refusal for refusal in refusals if refusal is not None), None)


def _fp8_latents_refusal(decode: str, compute_capability: int | None) -> str | None:
    entry = BACKENDS[decode].latents
    return None if entry is None else entry.fp8_refusal(compute_capability)


def _automatic(
    head_dims: Sequence[int],
    dtype: str,
    kv_dtype: str,
    compute_capability: int | None,
    scores: Scores,
    latents: tuple[int, int] | None,
    missing: Callable[[str], str | None],
    num_q_heads: int,
) -> tuple[str, str, list[str]]:
    """The best pair that serves the model and whose packages work; and a warning for each better one whose packages do
    not."""
    warnings: list[str] = []
    needs = (head_dims, dtype, kv_dtype, compute_capability, scores, latents)
    latent_heads = None if latents is None else num_q_heads
    for prefill, decode in preferences(compute_capability, kv_dtype == FP8_E4M3, latent_heads):
        names = tuple(dict.fromkeys((prefill, decode)))
        if latents is not None and kv_dtype == FP8_E4M3 and _fp8_latents_refusal(decode, compute_capability):
            continue
        if any(_refusal(BACKENDS[name], *needs) for name in names):
            continue
        for name in names:
            reason = _why_unusable(BACKENDS[name], scores, latents, missing)
            if reason is not None:
                warnings.append(
                    f"{','.join(names)} would be the best attention here, but {name} {reason}; to use it: "
                    f"{BACKENDS[name].remedy}"
                )
                break
        else:
            return prefill, decode, warnings
    raise AssertionError("torch needs no package and serves every model")


def preferences(
    compute_capability: int | None, fp8_kv: bool = False, latent_heads: int | None = None
) -> list[tuple[str, str]]:
    """The (prefill, decode) backends that `auto` tries on a device, best first. latent_heads: query heads of a rank
    with latents (MLA)."""
    if compute_capability is None:
        return [("torch", "torch")]
    last = [("triton", "triton"), ("torch", "torch")]
    if latent_heads is not None:
        both = [("fa", "flashmla"), ("fa", "fa")]
        libraries = [("fa", "triton")] if fp8_kv else both if latent_heads <= FLASHMLA_HEADS else both[::-1]
        return [*libraries, *last] if compute_capability == 90 else last
    if 100 <= compute_capability < 110:
        return [("trtllm", "trtllm"), ("fi", "fi"), *last]
    if compute_capability == 90 and not fp8_kv:  # FlashAttention would need the queries in FP8, too
        # The project's own decode kernel reads 4.3 TB/s where FlashInfer's reads 3.8 (docs/performance.md), and needs
        # no compilation by nvcc at first use.
        return [("fa", "triton"), *last]
    if compute_capability >= 80 and compute_capability != 90:
        return [("fi", "fi"), *last]
    return last


def _named(
    requested: str,
    compute_capability: int | None,
    scores: Scores,
    latents: tuple[int, int] | None,
    missing: Callable[[str], str | None],
) -> tuple[str, str]:
    names = requested.split(",")
    if len(names) > 2 or any(name not in BACKENDS for name in names):
        raise ConfigError(
            f"attention_backend is {requested!r}; allowed: auto, one of {' '.join(BACKENDS)}, or PREFILL,DECODE"
        )
    for name in names:
        entry = BACKENDS[name]
        if entry.device == "cuda" and compute_capability is None:
            raise ConfigError(f"attention_backend is {requested!r}, but {name} needs a GPU; allowed on CPU: torch")
        reason = _why_unusable(entry, scores, latents, missing)
        if reason is not None:
            raise ConfigError(f"attention_backend is {requested!r}, but {name} {reason}; to install it: {entry.remedy}")
    first = BACKENDS[names[0]]
    if latents is None and compute_capability is not None and compute_capability < first.prefill_capability:
        raise ConfigError(
            f"attention_backend is {requested!r}, but {names[0]} has no prefill kernel for compute capability "
            f"{compute_capability / 10:.1f} (needs {first.prefill_capability / 10:.1f}); a pair that works here: "
            f"{first.prefill_hint}"
        )
    return names[0], names[-1]


def _page_size(prefill: str, decode: str, requested: int | None, latents: bool) -> tuple[int, list[str]]:
    """The size set by the user, else decode's default; 64 where a backend does not allow it."""
    size = requested if requested is not None else BACKENDS[decode].default_page_size
    for name in (decode,) if latents else dict.fromkeys((prefill, decode)):
        entry = BACKENDS[name]
        allowed = entry.latents.page_sizes if latents and entry.latents is not None else entry.page_sizes
        if allowed is not None and size not in allowed:
            listed = ", ".join(str(value) for value in allowed)
            return 64, [f"page_size {size} becomes 64: the attention backend {name} allows {listed}"]
    return size, []


def _create(name: str, spec: AttentionSpec) -> list[AttentionBackend]:
    entry, keeps_latents = BACKENDS[name], any(group.latent is not None for group in spec.groups)
    for group in spec.groups:
        dtype, kv_dtype = (str(one).removeprefix("torch.") for one in (spec.dtype, group.kv.dtype))
        scores = Scores(group.soft_cap is not None, group.sinks, group.chunk is not None)
        latents = None if group.latent is None else (group.latent.rank, group.latent.rope_dim)
        if (refusal := entry.refusal(group.head_dim, dtype, kv_dtype, None, scores, latents)) is not None:
            raise ConfigError(f"the attention backend {name} {refusal}; use triton or torch")
    try:
        source = entry.latents if keeps_latents and entry.latents is not None else entry
        module = importlib.import_module(f"minisgl_backend.attention.{source.module}")
    except ImportError as error:
        raise ConfigError(f"the attention backend {name} cannot be loaded: {error}; {entry.remedy}") from error
    backends: list[AttentionBackend] = getattr(module, source.class_name).for_groups(spec, spec.groups)
    return backends
