"""What number formats and model families give on one GPU, each over bfloat16 or the card's floor, in one call.

    python -m benchmarks.formats [--only ROW,ROW,...] [--out FILE] [--json]

Every row is an engine in a process of its own, with random weights in a real shape: decode steps at batch 1, 8 and 64
with about 1,024 tokens of context, prefill of 16 x 4,000 tokens, and the offline load of benchmarks.gpu. Ratios are
speeds, so above 1 is faster; a row's base runs before it. Floors (benchmarks.floors) are by rates measured in the call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu import MODELS, _decode_row, _driver, _offline, _prefill, describe_machine

BATCHES = (1, 8, 64)
_EQUAL_PAGES = {"num_pages": 2000}  # what fits beside Qwen3-30B-A3B in 16 bits on 80 GB


@dataclass(frozen=True)
class Row:
    """One engine. `weights` and `experts` are formats of benchmarks.floors."""

    model: str  # of model_shapes.SHAPES
    base: str | None = None  # the row that it is compared with
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "plain"
    experts: str | None = None
    offline: bool = True


_FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3"}
ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "q14": Row("qwen3-14b"),
        "q14-fp8": Row("qwen3-14b", "q14", {"quantization": "fp8"}, "fp8"),
        "q14-fp8-cache": Row("qwen3-14b", "q14", {"quantization": "fp8", **_FP8_CACHE}, "fp8"),
        "q14-blocks": Row("qwen3-14b-fp8", "q14", {}, "fp8-blocks"),
        "q14-blocks-cache": Row("qwen3-14b-fp8", "q14", _FP8_CACHE, "fp8-blocks"),
        "q14-awq": Row("qwen3-14b-awq", "q14", {}, "int4"),
        "q14-gptq": Row("qwen3-14b-gptq", "q14", {}, "int4"),
        "q30": Row("qwen3-30b-a3b", None, _EQUAL_PAGES),
        "q30-blocks-cache": Row("qwen3-30b-a3b-fp8", "q30", {**_EQUAL_PAGES, **_FP8_CACHE}, "fp8-blocks"),
        "gpt-oss": Row("gpt-oss-20b", offline=False),
        "gpt-oss-mxfp4": Row("gpt-oss-20b-mxfp4", "gpt-oss", {}, "plain", "mxfp4", offline=False),
        "deepseek-v2-lite": Row("deepseek-v2-lite", offline=False),
        "gemma-3-12b": Row("gemma-3-12b", offline=False),
    }
)


def measure(row: Row) -> dict[str, float]:
    """This process opens the GPU. Milliseconds a step, tokens a second, pages of the cache; floors under `floor_`."""
    import torch

    from benchmarks.floors import Floors
    from benchmarks.limits import Limits
    from benchmarks.model_shapes import make_folder
    from minisgl_backend.models.config import ModelConfig

    limits = Limits.measured(torch.device("cuda"))
    driver = _driver(row.model, **row.options)
    results: dict[str, float] = {"start_s": round(driver.start_seconds, 1), "pages": driver.engine.welcome.num_pages}
    for batch in BATCHES:
        results |= _decode_row(driver, f"bs{batch}_ms", batch)
    results["prefill_tok_s"] = _prefill(driver, 4000, 16)
    if row.offline:
        results["offline_tok_s"] = _offline(driver)
    driver.close()
    config = ModelConfig.load(make_folder(row.model, MODELS))
    cache_bytes = 1.0 if "kv_cache_dtype" in row.options else 2.0
    floors = Floors(config, limits, weights=row.weights, experts=row.experts, kv_number_bytes=cache_bytes)
    found = floors.figures("floor")
    return results | {name: found[name] for name in (f"floor_{name}" for name in results) if name in found}


def speedups(found: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
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


def shares(found: Mapping[str, float]) -> dict[str, float]:
    """Of the card's floor that was reached."""
    floors = {name.removeprefix("floor_"): value for name, value in found.items() if name.startswith("floor_")}
    return speedups({name: value for name, value in found.items() if name in floors}, floors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, of: " + ", ".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path("formats-results.json"))
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(ROWS[arguments.row])))
        return
    results: dict[str, Any] = {"machine": describe_machine()}
    for name in arguments.only.split(","):
        command = [sys.executable, "-m", "benchmarks.formats", "--row", name]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = process.stdout.strip().splitlines()
        if process.returncode or not lines:
            print(f"{name}: failed with exit code {process.returncode}", flush=True)
            continue
        found = results[name] = json.loads(lines[-1])
        base = ROWS[name].base
        if base in results:
            found["speedup"] = speedups(found, results[base])
        found["share_of_floor"] = shares(found)
        arguments.out.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(found), flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
