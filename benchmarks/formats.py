"""What number formats and model families give on one GPU, each over bfloat16 or the card's floor, in one call; or on
several GPUs over one.

    python -m benchmarks.formats [--only ROW,...] [--tp N,...] [--libraries with|without|both] [--out FILE] [--json]

Every row is an engine in a process of its own, with random weights in a real shape: decode steps at batch 1, 8 and 64
with about 1,024 tokens of context, prefill of 16 x 4,000 tokens, and the offline load of benchmarks.gpu; some rows
have others. Ratios are speeds, so above 1 is faster; a row's base runs before it. Floors (benchmarks.floors) are by
rates measured in the call.

With `--libraries without` (or `--without-libraries`) rows run with torch and Triton alone, published kernel libraries
hidden, and are named ROW-alone; `both` runs each row in both ways, and its speedup is that over the libraries.

With `--tp 1,4` each row runs on one GPU and on four, where it is named ROW-tp4, its speedup is that over one GPU, and
its floor is that of four GPUs whose sums cost nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import (
    DECODE_CONTEXT,
    MODELS,
    _decode_row,
    _driver,
    _offline,
    _prefill,
    describe_machine,
    offline_load,
)
from benchmarks.hidden_libraries import hide_libraries

if TYPE_CHECKING:
    from benchmarks.limits import Limits
    from minisgl_backend.models.config import ModelConfig

DECODE = tuple((batch, DECODE_CONTEXT) for batch in (1, 8, 64))
PROMPT, NUM_PROMPTS = 4000, 16  # tokens of a prompt, prompts at once
ALONE = "-alone"  # ends the name of a row that ran without published libraries
LIBRARIES = {"with": (False,), "without": (True,), "both": (False, True)}  # whether they are hidden, in turn
_EQUAL_PAGES = {"num_pages": 2000}  # what fits beside Qwen3-30B-A3B in 16 bits on 80 GB


@dataclass(frozen=True)
class Row:
    """One engine. `weights` and `experts` are formats of benchmarks.floors."""

    model: str  # of model_shapes.SHAPES
    base: str | None = None  # the row that it is compared with
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "plain"
    experts: str | None = None
    decode: tuple[tuple[int, int], ...] = DECODE  # batch, and tokens of context
    prefill: bool = True
    offline: bool = True
    draws: bool = False  # experts are drawn uniformly, and counted


_FEW_AND_MANY = ((1, DECODE_CONTEXT), (64, DECODE_CONTEXT))
_TRANSFORMERS = {"model_impl": "transformers"}
_FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3"}
ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "q14": Row("qwen3-14b"),
        "q32": Row("qwen3-32b"),
        "q14-transformers": Row("qwen3-14b", "q14", _TRANSFORMERS, decode=_FEW_AND_MANY, prefill=False, offline=False),
        "q14-fp8": Row("qwen3-14b", "q14", {"quantization": "fp8"}, "fp8"),
        "q14-fp8-cache": Row("qwen3-14b", "q14", {"quantization": "fp8", **_FP8_CACHE}, "fp8"),
        "q14-blocks": Row("qwen3-14b-fp8", "q14", {}, "fp8-blocks"),
        "q14-blocks-cache": Row("qwen3-14b-fp8", "q14", _FP8_CACHE, "fp8-blocks"),
        "q14-awq": Row("qwen3-14b-awq", "q14", {}, "int4"),
        "q14-gptq": Row("qwen3-14b-gptq", "q14", {}, "int4"),
        "q14-gguf": Row("qwen3-14b-gguf", "q14", {"dummy_weights": False}, "q4_k"),
        "q30": Row("qwen3-30b-a3b", None, _EQUAL_PAGES),
        "q30-blocks": Row("qwen3-30b-a3b-fp8", "q30", {}, "fp8-blocks"),
        "q30-blocks-cache": Row("qwen3-30b-a3b-fp8", "q30", {**_EQUAL_PAGES, **_FP8_CACHE}, "fp8-blocks"),
        "gpt-oss": Row("gpt-oss-20b", offline=False, draws=True),
        "gpt-oss-mxfp4": Row("gpt-oss-20b-mxfp4", "gpt-oss", {}, "plain", "mxfp4", offline=False, draws=True),
        "gpt-oss-120b-mxfp4": Row("gpt-oss-120b-mxfp4", None, {}, "plain", "mxfp4", offline=False, draws=True),
        "deepseek-v2-lite": Row("deepseek-v2-lite", decode=(*DECODE, (64, 16_000)), offline=False),
        "gemma-3-12b": Row("gemma-3-12b", offline=False),
        "qwen3.5-9b-text": Row("qwen3.5-9b-text", decode=(*DECODE, (256, DECODE_CONTEXT)), offline=False),
        "qwen3-next-cut": Row("qwen3-next-cut", offline=False),
        "qwen3-next-cut-blocks": Row("qwen3-next-cut-fp8", "qwen3-next-cut", {}, "fp8-blocks", offline=False),
        "lfm2": Row("lfm2-1.2b", offline=False),
        "q06": Row("qwen3-0.6b"),
        "q06-transformers": Row("qwen3-0.6b", "q06", _TRANSFORMERS, decode=_FEW_AND_MANY, prefill=False, offline=False),
    }
)


def measure(row: Row, tp: int = 1) -> dict[str, Any]:
    """This process opens the GPU. Milliseconds a step, tokens a second, pages of the cache; floors under `floor_`.
    tp: GPUs of the engine."""
    import torch

    from benchmarks.drawn_experts import draw_uniformly, recorded
    from benchmarks.limits import Limits
    from benchmarks.model_shapes import IN_BLOCKS, make_folder
    from benchmarks.random_blocks import file_bytes
    from minisgl_backend.models.config import ModelConfig

    limits = Limits.measured(torch.device("cuda"))
    driver = _driver(row.model, **row.options, tp=tp)
    welcome = driver.engine.welcome
    results: dict[str, Any] = {"engine": welcome.description, "start_s": round(driver.start_seconds, 1)}
    results["pages"] = welcome.num_pages
    model = driver.core._runner._model
    if row.model in IN_BLOCKS:
        loaded = sum(one.nbytes for one in model.parameters())
        results["memory_over_file"] = round(loaded / file_bytes(make_folder(row.model, MODELS)), 3)
    if row.draws:
        draw_uniformly(model)
    for batch, context in row.decode:
        results |= _decode_row(driver, decode_name(batch, context), batch, context)
    if row.prefill:
        results["prefill_tok_s"] = _prefill(driver, PROMPT, NUM_PROMPTS)
    if row.offline:
        results["offline_tok_s"] = _offline(driver)
    if row.draws:
        with recorded([batch for batch, _ in row.decode]) as drawn:
            _prefill(driver, PROMPT - 1, NUM_PROMPTS // 4)  # other tokens than those that are cached
        results["distinct_experts"] = drawn.distinct
    driver.close()
    found = results.get("distinct_experts")
    known = floors(row, ModelConfig.load(make_folder(row.model, MODELS)), limits.times(tp), found)
    return results | {f"floor_{name}": known[name] for name in results if name in known}


def decode_name(batch: int, context: int) -> str:
    """Of a figure; DECODE_CONTEXT goes without saying."""
    return f"bs{batch}_ms" if context == DECODE_CONTEXT else f"bs{batch}_{context}_ms"


def floors(row: Row, config: ModelConfig, limits: Limits, drawn: Mapping[int, float] | None = None) -> dict[str, float]:
    """Of all that a row measures, by its names. config: of its model, by a native family. drawn: see `Floors`."""
    from benchmarks.floors import Floors

    cache_bytes = 1.0 if "kv_cache_dtype" in row.options else 2.0
    card = Floors(config, limits, weights=row.weights, experts=row.experts, kv_number_bytes=cache_bytes, drawn=drawn)
    found = {decode_name(batch, context): card.decode_ms(batch, context) for batch, context in row.decode}
    if row.prefill:
        found["prefill_tok_s"] = card.prefill_tok_s(PROMPT)
    if row.offline:
        found["offline_tok_s"] = card.offline_tok_s(offline_load())
    return found


def speedups(found: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """How much faster than `base`, by the names of its figures."""
    ratios = {}
    for name in sorted(found.keys() & base.keys()):
        if name.startswith("floor_"):
            continue
        if name.endswith("_ms"):
            ratios[name] = round(base[name] / found[name], 3)
        elif name.endswith("tok_s"):
            ratios[name] = round(found[name] / base[name], 3)
    return ratios


def shares(found: Mapping[str, Any]) -> dict[str, float]:
    """Of the card's floor that was reached."""
    floors = {name.removeprefix("floor_"): value for name, value in found.items() if name.startswith("floor_")}
    return speedups({name: value for name, value in found.items() if name in floors}, floors)


def runs(rows: Sequence[str], libraries: str, tps: Sequence[int] = (1,)) -> list[tuple[str, bool, int]]:
    """Rows in the order in which they run, whether with the libraries hidden, and on how many GPUs. SystemExit: some
    are unknown."""
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        raise SystemExit(f"--only has {', '.join(unknown)}; allowed: {', '.join(ROWS)}")
    return [(row, is_alone, tp) for row in rows for is_alone in LIBRARIES[libraries] for tp in tps]


def name_of(row: str, is_alone: bool, tp: int) -> str:
    """Of a result."""
    return row + ALONE * is_alone + f"-tp{tp}" * (tp > 1)


def bases(row: str, is_alone: bool, tp: int = 1) -> list[str]:
    """Names of results that a row is compared with, the first that there is: on several GPUs itself on one, without
    libraries itself with them, else its base in the same way."""
    base = ROWS[row].base
    if tp > 1:
        return [name_of(row, is_alone, 1)]
    if is_alone:
        return [row] if base is None else [row, base + ALONE]
    return [] if base is None else [base]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, of: " + ", ".join(ROWS))
    parser.add_argument("--tp", default="1", help="GPUs of each row's engines, one after the other: 1,4")
    parser.add_argument("--libraries", choices=LIBRARIES, default="with", help="published kernel libraries")
    parser.add_argument("--without-libraries", dest="libraries", action="store_const", const="without")
    parser.add_argument("--out", type=Path, default=Path("formats-results.json"))
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        if arguments.libraries == "without":
            hide_libraries()
        print(json.dumps(measure(ROWS[arguments.row], int(arguments.tp))))
        return
    results: dict[str, Any] = {"machine": describe_machine()}
    tps = [int(tp) for tp in arguments.tp.split(",")]
    for row, is_alone, tp in runs(arguments.only.split(","), arguments.libraries, tps):
        name = name_of(row, is_alone, tp)
        command = [sys.executable, "-m", "benchmarks.formats", "--row", row, "--tp", str(tp)]
        process = subprocess.run(command + ["--without-libraries"] * is_alone, stdout=subprocess.PIPE, text=True)
        lines = process.stdout.strip().splitlines()
        if process.returncode or not lines:
            print(f"{name}: failed with exit code {process.returncode}", flush=True)
            continue
        found = results[name] = json.loads(lines[-1])
        base = next((base for base in bases(row, is_alone, tp) if base in results), None)
        if base is not None:
            found["base"], found["speedup"] = base, speedups(found, results[base])
        found["share_of_floor"] = shares(found)
        arguments.out.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(found), flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
