"""Kernels that were measured fastest on this device, where the table of choose.py has several that are close.

Measured is the whole of what a layer asks for (norm, quantization, GEMM, epilogue), in the variants that a trial step
has asked for before, on the model's own weights, one after the other, so that none of them lies in the L2 cache. A
kernel other than the table's has to win by WORTH and to give the same numbers. All is done at the first start of a
shape, in BUDGET_S for all shapes of a model, and read from the file after that; what there was no time for keeps the
table's order.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

import minisgl_backend.kernels
from minisgl_backend.kernels.device_facts import DISTRIBUTIONS, DeviceFacts
from minisgl_backend.kernels.linear.call import MEASURED_ROWS, GemmCall, LinearKey, representative_rows
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.tuning.choices_file import Choices, ChoicesFile
from minisgl_backend.kernels.linear.tuning.timing import GraphTimer, MeasuringStream, cold, is_close, take_turns

log = logging.getLogger(__name__)

BUDGET_S = 4.0
WORTH = 0.97  # of the time of the table's kernel: a smaller gain is noise, or is lost in a chain of kernels
_KERNEL = re.compile(r"[a-z][a-z0-9_]*")


class Multiplies(Protocol):
    """The kernels of a format, as far as measuring needs them."""

    chooser: LinearChooser

    def multiply(self, kernel: str, x: torch.Tensor, weight: Any, call: GemmCall) -> torch.Tensor:
        """By the kernel of that name. One that cannot, for whatever reason, raises."""


class KernelTuner:
    """Of one device and one model, whose formats share the budget."""

    def __init__(self, stream: MeasuringStream, facts: DeviceFacts, choices: Path | None, budget_s: float = BUDGET_S):
        """choices: the file that remembers them; None: they are measured anew."""
        self._stream, self._facts, self._file = stream, facts, ChoicesFile(choices)
        self._left_s = budget_s

    def tune(self, kernels: Multiplies, weights: Sequence[Any], rows: Sequence[int], longest: int) -> None:
        """Has the kernels' chooser prefer the fastest for weights of one `WeightKind`: for these decode row counts,
        and for prefill up to `longest` rows.

        Synchronises with the device. Where a measurement fails, the table's order stands: that is no error.
        """
        kind, chooser = weights[0].kind, kernels.chooser
        sizes = rows_to_measure(rows, longest)
        some = weights[: cold(len(weights), kind.nbytes)]
        for variant in chooser.asked(kind.size_out, kind.size_in):
            keys = [key for size in sizes if chooser.contenders(key := variant._replace(rows=size))]
            if not keys:
                continue
            entry = self._entry(f"{chooser.weight_format} {kind.detail}".rstrip(), variant)
            chosen = self._file.read(entry, _KERNEL)
            refusing = self._refusing(chosen, kernels, weights[0], keys)
            chosen = {count: kernel for count, kernel in chosen.items() if kernel not in refusing}
            missing = [key for key in keys if chosen.get(str(key.rows)) not in chooser.contenders(key)]
            if missing:
                measured = self._measure(kernels, some, missing)
                self._file.add(entry, measured)
                chosen |= measured
            for key in keys:
                if (kernel := chosen.get(str(key.rows))) is not None:
                    chooser.prefer(key, kernel)

    def _measure(self, kernels: Multiplies, weights: Sequence[Any], keys: Sequence[LinearKey]) -> Choices:
        """The fastest kernel by number of rows; those that fail, or that there is no time for, are left out."""
        chooser = kernels.chooser
        found: Choices = {}
        started = time.monotonic()
        with self._stream.current():
            for key in reversed(keys):  # the largest first: the others fit into its memory
                if time.monotonic() - started > self._left_s:
                    break
                try:
                    found[str(key.rows)] = self._fastest(kernels, weights, key)
                except RuntimeError as error:  # out of memory is one of them
                    self._stream.recover()
                    log.warning("%s of %s is not measured: %s", chooser.contenders(key), _text(key), error)
        seconds = time.monotonic() - started
        self._left_s -= seconds
        log.info(
            "%s weights, %s: fastest by rows %s (measured in %.1f s)", chooser.weight_format, _text(keys[0]),
            ", ".join(f"{rows} {kernel}" for rows, kernel in reversed(found.items())), seconds,
        )  # fmt: skip
        if len(found) < len(keys) and self._left_s <= 0:
            log.info("no time is left for measuring kernels: the others are as the table says; the next start goes on")
        return found

    def _refusing(self, chosen: Choices, kernels: Multiplies, weight: Any, keys: Sequence[LinearKey]) -> set[str]:
        """Kernels that a file prefers to the table's and that do not run now: an installation may have been broken."""
        preferred = {
            kernel: key
            for key in keys
            if (kernel := chosen.get(str(key.rows))) in kernels.chooser.contenders(key)[1:] and kernel is not None
        }
        refusing = set()
        for kernel, key in preferred.items():
            with self._stream.current():
                x = self._stream.randn(key.rows, key.size_in, key.dtype)
                try:
                    kernels.multiply(kernel, x, weight, _call(x, key))
                except Exception as error:
                    self._stream.recover()
                    log.warning("%s was measured fastest for %s, and is not taken: %s", kernel, _text(key), error)
                    refusing.add(kernel)
        return refusing

    def _fastest(self, kernels: Multiplies, weights: Sequence[Any], key: LinearKey) -> str:
        """The first of the contenders is what runs if none is faster."""
        contenders = kernels.chooser.contenders(key)
        x = self._stream.randn(key.rows, key.size_in, key.dtype)
        call = _call(x, key)
        timers: dict[str, GraphTimer] = {}
        expected: torch.Tensor | None = None
        for kernel in contenders:
            try:
                out = kernels.multiply(kernel, x, weights[0], _call(x, key))  # the residual may be overwritten
                expected = out if expected is None else expected
                if not is_close(out, expected):
                    log.warning("%s is not taken for %s: %s has other numbers", kernel, _text(key), contenders[0])
                    continue
                timers[kernel] = GraphTimer([partial(kernels.multiply, kernel, x, one, call) for one in weights])
            except Exception as error:  # compiled packages fail in many ways
                if kernel == contenders[0]:
                    raise
                self._stream.recover()
                log.debug("%s does not multiply %s: %s", kernel, _text(key), error)
        take_turns(list(timers.values()))
        times = {kernel: timer.median for kernel, timer in timers.items()}
        log.debug("%s, %d rows: %s us", _text(key), key.rows, times)
        best = min(times, key=times.__getitem__)
        return best if times[best] < WORTH * times[contenders[0]] else contenders[0]

    def _entry(self, weight_format: str, variant: LinearKey) -> str:
        packages = sorted(self._facts.libraries & DISTRIBUTIONS.keys())
        versions = [f"torch {torch.__version__}", *(f"{name} {version_of(name)}" for name in packages)]
        return " ".join([self._facts.name, weight_format, _text(variant), *versions, "kernels", sources_digest()])


def _call(x: torch.Tensor, key: LinearKey) -> GemmCall:
    """What a layer gives beside x."""
    size_out = key.size_out // 2 if key.activation else key.size_out
    return GemmCall(
        norm_weight=x.new_ones(key.size_in) if key.norm else None,
        eps=1e-6,
        bias=x.new_zeros(key.size_out) if key.bias else None,
        residual=x.new_zeros(key.rows, size_out) if key.residual else None,
        activation=key.activation,
    )


def rows_to_measure(rows: Sequence[int], longest: int) -> list[int]:
    """Representatives of decode row counts and of steps with prompts, ascending."""
    least, most = MEASURED_ROWS
    of_prompts, size = [], least
    while size < min(longest, most):
        size *= 2
        of_prompts.append(size)
    return sorted({*of_prompts, *(representative_rows(count) for count in rows)})


def _text(key: LinearKey) -> str:
    """Of all but its rows."""
    parts = ("norm", key.norm), ("bias", key.bias), (key.activation, key.activation), ("residual", key.residual)
    block = None if key.block is None else f"blocks of {key.block[0]}x{key.block[1]}"
    inside = " ".join(str(name) for name, is_there in (*parts, (block, block)) if is_there)
    return f"{key.size_out}x{key.size_in} {key.dtype} {inside}".rstrip()


@cache
def version_of(package: str) -> str:
    """Of a package of DISTRIBUTIONS; packages that were copied, not installed, have none."""
    for distribution in DISTRIBUTIONS[package]:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "?"


@cache
def sources_digest() -> str:
    """Of this project's kernels: another one where any of their files changed."""
    digest = hashlib.sha256()
    for file in sorted(Path(minisgl_backend.kernels.__path__[0]).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
