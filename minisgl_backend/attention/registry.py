"""Registry of attention backends: which to use on which machine, what each needs, and their page size.

Backends are imported only when they are chosen, so a missing package only matters to users of its backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minisgl_backend import config
from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, LayerGroup
from minisgl_backend.attention.by_batch import DecodeByBatchBackend
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.entry import AttentionKind, WhyMissing
from minisgl_backend.attention.latent.kind import MLAKind
from minisgl_backend.attention.mha import MHAKind
from minisgl_backend.attention.needs import MHA, MLA, AttentionNeeds, Scores
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.errors import ConfigError

KINDS: Mapping[str, AttentionKind] = MappingProxyType({MHA: MHAKind(), MLA: MLAKind()})


@dataclass(frozen=True)
class AttentionChoice:
    """`attention_backend` and `page_size` resolved for one machine."""

    prefill: str
    decode: str
    page_size: int  # tokens
    warnings: tuple[str, ...]  # for the log
    decode_by_batch: DecodeByBatch | None = None  # None: `decode` serves all batch sizes


def choose_attention(
    requested: str, page_size: int | None, needs: AttentionNeeds, why_missing: WhyMissing | None = None
) -> AttentionChoice:
    """Resolves the two options for a model's needs. Imports the packages that it considers, and nothing on CPU.

    `why_missing(name)` returns None for a package, or a MODULE:FUNCTION, that works, else the reason. Raises
    ConfigError for a requested backend that cannot run here.
    """
    missing, kind = why_missing or import_failure, KINDS[needs.kind]
    kind.check(needs)
    by_batch: DecodeByBatch | None = None
    warnings: list[str] = []
    if requested == "auto":
        prefill, decode, warnings = _automatic(kind, needs, missing)
        by_batch = kind.decode_by_batch(needs, decode)
        if by_batch is not None and kind.backends[by_batch.backend].failure(needs, missing) is not None:
            by_batch = None
    else:
        prefill, decode = _named(requested, kind, needs, missing)
    size, size_warnings = _page_size(kind, prefill, decode, page_size)
    return AttentionChoice(prefill, decode, size, (*warnings, *size_warnings), by_batch)


def create_attention(
    prefill: str, decode: str, spec: AttentionSpec, by_batch: DecodeByBatch | None = None
) -> AttentionPair:
    """The backends of both parts of a step for each group; one object serves both if the names are the same. by_batch:
    `AttentionChoice.decode_by_batch`."""
    prefill_backends = _create(prefill, spec)
    decode_backends = prefill_backends if decode == prefill else _create(decode, spec)
    if by_batch is not None:
        pairs = zip(_create(by_batch.backend, spec), decode_backends, strict=True)
        decode_backends = [DecodeByBatchBackend(few, more, by_batch) for few, more in pairs]
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


def preferences(needs: AttentionNeeds) -> list[tuple[str, str]]:
    """The (prefill, decode) backends that `auto` tries, best first."""
    if needs.compute_capability is None:
        return [("torch", "torch")]
    return [*KINDS[needs.kind].preferences(needs), ("triton", "triton"), ("torch", "torch")]


def _automatic(kind: AttentionKind, needs: AttentionNeeds, missing: WhyMissing) -> tuple[str, str, list[str]]:
    """The best pair that serves the model and whose packages work; and a warning for each better one whose packages do
    not."""
    warnings: list[str] = []
    for prefill, decode in preferences(needs):
        entries = {name: kind.backends[name] for name in (prefill, decode)}
        if entries[decode].decode_refusal(needs) or any(entry.refusal(needs) for entry in entries.values()):
            continue
        for name, entry in entries.items():
            if (reason := entry.failure(needs, missing)) is not None:
                warnings.append(
                    f"{','.join(entries)} would be the best attention here, but {name} {reason}; to use it: "
                    f"{entry.library.remedy}"
                )
                break
        else:
            return prefill, decode, warnings
    raise AssertionError("torch needs no package and serves every model")


def _named(requested: str, kind: AttentionKind, needs: AttentionNeeds, missing: WhyMissing) -> tuple[str, str]:
    names, said = requested.split(","), f"attention_backend is {requested!r}"
    if len(names) > 2 or any(name not in config.BACKENDS for name in names):
        raise ConfigError(f"{said}; allowed: auto, one of {' '.join(config.BACKENDS)}, or PREFILL,DECODE")
    prefill, decode = names[0], names[-1]
    for name in names:
        if (refusal := _unavailable(name, kind, needs, missing)) is not None:
            raise ConfigError(f"{said}, but {name} {refusal}")
    if (refusal := kind.backends[prefill].prefill_refusal(needs)) is not None:
        raise ConfigError(f"{said}, but {prefill} {refusal}")
    for name in names:
        entry = kind.backends[name]
        refusal = entry.refusal(needs) or (entry.decode_refusal(needs) if name == decode else None)
        if refusal is not None:
            raise ConfigError(f"{said}, but {name} {refusal}; use triton or torch")
    return prefill, decode


def _unavailable(name: str, kind: AttentionKind, needs: AttentionNeeds, missing: WhyMissing) -> str | None:
    """Why this machine has no such backend of this kind, as a clause that follows its name."""
    entry = kind.backends.get(name)
    if needs.compute_capability is None and (entry is None or entry.needs_gpu):
        return "needs a GPU; allowed on CPU: torch"
    if entry is None:
        return f"{kind.unserved}; use triton or torch"
    reason = entry.failure(needs, missing)
    return None if reason is None else f"{reason}; to install it: {entry.library.remedy}"


def _page_size(kind: AttentionKind, prefill: str, decode: str, requested: int | None) -> tuple[int, list[str]]:
    """The size set by the user, else decode's default; 64 where a backend does not allow it."""
    size = requested if requested is not None else kind.backends[decode].default_page_size
    for name in (prefill, decode):
        entry = kind.backends[name]
        reads_pages = name == decode or entry.prefill_reads_pages
        if reads_pages and entry.page_sizes is not None and size not in entry.page_sizes:
            listed = ", ".join(map(str, entry.page_sizes))
            return 64, [f"page_size {size} becomes 64: the attention backend {name} allows {listed}"]
    return size, []


def _create(name: str, spec: AttentionSpec) -> list[AttentionBackend]:
    made: dict[LayerGroup, AttentionBackend] = {}
    for kind in dict.fromkeys(group.kind for group in spec.groups):
        groups = [group for group in spec.groups if group.kind == kind]
        entry = KINDS[kind].backends.get(name)
        if entry is None:
            raise ConfigError(f"the attention backend {name} {KINDS[kind].unserved}; use triton or torch")
        for group in groups:
            if (refusal := entry.refusal(_needs_of(group, spec))) is not None:
                raise ConfigError(f"the attention backend {name} {refusal}; use triton or torch")
        try:
            backend = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"the attention backend {name} cannot be loaded: {error}; {entry.library.remedy}"
            ) from error
        made |= zip(groups, backend.for_groups(spec, groups), strict=True)
    return [made[group] for group in spec.groups]


def _needs_of(group: LayerGroup, spec: AttentionSpec) -> AttentionNeeds:
    """On whatever GPU."""
    dtype, kv_dtype = (str(one).removeprefix("torch.") for one in (spec.dtype, group.kv.dtype))
    return AttentionNeeds(
        compute_capability=None,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dims=(group.head_dim,),
        scores=Scores(group.soft_cap is not None, group.sinks, group.chunk is not None),
        latents=None if group.latent is None else (group.latent.rank, group.latent.rope_dim),
    )
