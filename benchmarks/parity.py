"""Parity with transformers: the same random weights, the same tokens, the logits of every position compared.

    python -m benchmarks.parity [--models qwen3-0.6b,llama-3.2-1b] [--backends "torch triton fa,triton"] [--json]

For each model, in its real shape:

- `fp32_ratio`: max|difference| / max|reference| of the logits, backend `torch` in float32 against transformers in
  float32 (eager attention, no TF32). Bound: 1e-4.
- `bf16_kl_transformers`: mean KL divergence, in nats, of transformers' own bf16 next-token distributions (its default
  attention) from its float32 ones, the same bf16 checkpoint in both; `..._decode` counts only the positions below.
- `kl_ratio_BACKEND_pageN`: the same mean for the engine's bf16, divided by transformers'. `decode_kl_ratio_...`: both
  means over the positions that the engine computes one at a time, in which the small-batch kernels and the captured
  graphs work. Bound of both: 1.2.
- `entropy`: mean entropy of the reference's distributions in nats; says that the comparison means something.

The engine's side is its model runner with the operations, attention kernels and CUDA graphs of this machine: prompts
alone, together, in chunks behind a cached prefix and beside decoding rows, then steps of various batch sizes. A backend
that this machine cannot run is null, one that fails is nan (its traceback goes to stderr) and makes the exit code 1,
as does a figure above its bound.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.logits_runner import LogitsRunner
from benchmarks.model_shapes import SHAPES
from benchmarks.parity_reference import Sequences, device, save_checkpoint, transformers_logits
from minisgl_backend.attention.needs import AttentionNeeds
from minisgl_backend.attention.registry import choose_attention
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.runner.start.device import MachineFacts

MODELS = ("qwen3-0.6b", "llama-3.2-1b")
BACKENDS = ("torch", "triton", "fa", "fi", "trtllm", "fa,triton", "fa,fi", "fa,trtllm")
PAGE_SIZE = 64
OTHER_PAGE_SIZES = (1, 16)  # for one backend: OTHER_PAGES_BACKEND, or the first where that is not asked for
OTHER_PAGES_BACKEND = "fa,triton"  # what `auto` takes on Hopper
FP32_BOUND, KL_BOUND = 1e-4, 1.2

_SLAB = 128  # positions whose distributions exist at once, in float64
Results = dict[str, float | None]


@dataclass(frozen=True)
class Workload:
    """Random tokens: prompts of these lengths, and `num_decode` tokens behind each that come one at a time."""

    prompt_lengths: tuple[int, ...] = (9, 17, 30, 48, 64, 65, 100, 127, 128, 200, 300, 420, 600, 850, 1200, 1500)
    num_decode: int = 48
    chunk: int = 1024  # longest part of a prompt in one step

    def sequences(self, vocab_size: int) -> Sequences:
        rng = random.Random(0)
        lengths = [length + self.num_decode for length in self.prompt_lengths]
        tokens = tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths)
        return Sequences(tokens, self.prompt_lengths)


def run_parity(
    models: Sequence[str],
    backends: Sequence[str],
    parent_folder: Path,
    *,
    shapes: Mapping[str, dict[str, Any]] = SHAPES,
    workload: Workload | None = None,
) -> Results:
    """All figures, by name; see the module's docstring. Checkpoints are kept in `parent_folder`.

    `models` are names of `shapes`, contents of a config.json each.
    """
    torch.set_float32_matmul_precision("highest")
    started = time.perf_counter()
    results: Results = {}
    for name in models:
        slug = name.replace("-", "_").replace(".", "_")
        found = _guarded(name, lambda: _measure(name, shapes[name], backends, parent_folder, workload or Workload()))
        figures = _no_figures(backends) if found is None else found
        results |= {f"parity_{slug}_{key}": value for key, value in figures.items()}
    results["parity_worst_fp32_ratio"] = _worst(results, "_fp32_ratio")
    results["parity_worst_kl_ratio"] = _worst(results, "kl_ratio_")
    results["parity_seconds"] = round(time.perf_counter() - started, 1)
    return results


def cells(backends: Sequence[str]) -> list[tuple[str, int]]:
    """Backend and page size of every bf16 measurement."""
    varied = OTHER_PAGES_BACKEND if OTHER_PAGES_BACKEND in backends else backends[0]
    return [*((name, PAGE_SIZE) for name in backends), *((varied, size) for size in OTHER_PAGE_SIZES)]


def _measure(name: str, shape: dict[str, Any], backends: Sequence[str], parent: Path, workload: Workload) -> Results:
    folder = save_checkpoint(name, shape, parent)
    sequences = workload.sequences(shape["vocab_size"])
    decoded = sequences.decoded()
    reference = transformers_logits(folder, sequences, torch.float32)
    of_transformers = kl_divergence(reference, transformers_logits(folder, sequences, torch.bfloat16))
    results: Results = {"entropy": round(mean_entropy(reference), 2)}
    results["bf16_kl_transformers"] = _significant(_mean(of_transformers))
    results["bf16_kl_transformers_decode"] = _significant(_mean(of_transformers[decoded]))
    _log(f"{name} transformers: {results}")
    model = _load(folder, workload, torch.float32)
    ratio = _guarded(
        f"{name} float32", lambda: largest_ratio(reference, _run(model, "torch", PAGE_SIZE, sequences, workload))
    )
    results["fp32_ratio"] = math.nan if ratio is None else _significant(ratio)
    _log(f"{name} float32: {results['fp32_ratio']}")
    model = _load(folder, workload, torch.bfloat16)
    for backend, page_size in cells(backends):
        whole, part = _kl_ratios(
            f"{name} {backend} page {page_size}",
            lambda: (
                choose_attention(backend, page_size, AttentionNeeds(compute_capability=_capability())).page_size
                == page_size
            ),
            lambda: kl_divergence(reference, _run(model, backend, page_size, sequences, workload)),
            of_transformers,
            decoded,
        )
        cell = _cell_name(backend, page_size)
        results |= {f"kl_ratio_{cell}": whole, f"decode_kl_ratio_{cell}": part}
    return results


def _no_figures(backends: Sequence[str]) -> Results:
    """Of a model whose reference could not be computed."""
    names = ["fp32_ratio", "bf16_kl_transformers", *(f"kl_ratio_{_cell_name(*cell)}" for cell in cells(backends))]
    return dict.fromkeys(names, math.nan)


def _cell_name(backend: str, page_size: int) -> str:
    return f"{backend.replace(',', '_')}_page{page_size}"


def _kl_ratios(
    what: str,
    available: Callable[[], bool],
    measure: Callable[[], torch.Tensor],
    of_transformers: torch.Tensor,
    decoded: torch.Tensor,
) -> tuple[float | None, float | None]:
    """The two ratios of one cell; None where it cannot run here, nan where it failed."""
    started = time.perf_counter()
    try:
        if not available():
            raise ConfigError("not with this page size")
        divergence = measure()
    except ConfigError as error:
        _log(f"{what}: skipped: {error}")
        return None, None
    except Exception:
        traceback.print_exc()
        _log(f"{what}: failed")
        return math.nan, math.nan
    finally:
        _free()
    whole = round(_mean(divergence) / _mean(of_transformers), 3)
    part = round(_mean(divergence[decoded]) / _mean(of_transformers[decoded]), 3)
    _log(f"{what}: {whole}, decode {part} ({time.perf_counter() - started:.1f} s)")
    return whole, part


@torch.inference_mode()
def kl_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || logits) in nats of each position; both [num_tokens, vocab_size] -> float64 [num_tokens], host."""
    parts = []
    for first, second in zip(reference.split(_SLAB), logits.split(_SLAB), strict=True):
        p, q = (torch.log_softmax(slab.double(), dim=-1) for slab in (first, second))
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts).cpu()


@torch.inference_mode()
def mean_entropy(logits: torch.Tensor) -> float:
    """In nats; logits [num_tokens, vocab_size]."""
    logs = [torch.log_softmax(slab.double(), dim=-1) for slab in logits[:: max(1, len(logits) // 512)].split(_SLAB)]
    return _mean(torch.cat([-(log.exp() * log).sum(-1) for log in logs]))


@torch.inference_mode()
def largest_ratio(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """max|logits - reference| / max|reference| over all positions."""
    slabs = zip(reference.split(_SLAB), logits.split(_SLAB), strict=True)
    largest = torch.stack([torch.stack([(b - a).abs().max(), a.abs().max()]) for a, b in slabs]).amax(0)
    return float(largest[0] / largest[1])


def _load(folder: Path, workload: Workload, dtype: torch.dtype) -> CausalLM:
    load = LoadConfig(dtype=dtype, device=device(), max_seq_len=_max_seq_len(workload))
    return build_model(ModelConfig.load(folder), folder, load)


def _run(model: CausalLM, backend: str, page_size: int, sequences: Sequences, workload: Workload) -> torch.Tensor:
    runner = LogitsRunner(model, backend, sequences, page_size=page_size, max_seq_len=_max_seq_len(workload))
    return runner.run(workload.chunk)


def _max_seq_len(workload: Workload) -> int:
    return 1 << (max(workload.prompt_lengths) + workload.num_decode).bit_length()


def _capability() -> int | None:
    capability = MachineFacts.detect().capability
    return None if capability is None else 10 * capability[0] + capability[1]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _guarded(what: str, measure: Callable[[], Any]) -> Any:
    """What `measure` returns; None where it failed, the traceback on stderr."""
    try:
        return measure()
    except Exception:
        traceback.print_exc()
        _log(f"{what}: failed")
        return None
    finally:
        _free()


def _worst(results: Results, key: str) -> float | None:
    """The largest of the figures whose name has `key` in it; nan where one of them is, None where there are none."""
    values = [value for name, value in results.items() if key in name and value is not None]
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


def _mean(values: torch.Tensor) -> float:
    return float(values.mean())


def _significant(value: float) -> float:
    return float(f"{value:.3g}")


def _log(text: str) -> None:
    print(f"parity: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of: " + ", ".join(SHAPES))
    parser.add_argument("--backends", default=" ".join(BACKENDS), help="names or PREFILL,DECODE, with spaces between")
    default = os.environ.get("MINISGL_BENCH_MODELS", Path(tempfile.gettempdir()) / "minisgl-bench-models")
    parser.add_argument("--folder", type=Path, default=Path(default), help="where checkpoints are kept")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models.split(",") if name not in SHAPES]
    if unknown or not arguments.backends.split():
        parser.error(f"unknown models {unknown}" if unknown else "no backends")
    results = run_parity(arguments.models.split(","), arguments.backends.split(), arguments.folder)
    if arguments.json:
        print(json.dumps(results))
    else:
        print("\n".join(f"{name:60} {'skipped' if value is None else value}" for name, value in results.items()))
    raise SystemExit(exit_code(results))


def exit_code(results: Results) -> int:
    """1 where something failed or is above its bound; what was skipped counts for nothing."""
    bounds = {"parity_worst_fp32_ratio": FP32_BOUND, "parity_worst_kl_ratio": KL_BOUND}
    failed = any(value is not None and math.isnan(value) for value in results.values())
    above = [name for name, bound in bounds.items() if (value := results[name]) is not None and value > bound]
    return int(failed or bool(above))


if __name__ == "__main__":
    main()
