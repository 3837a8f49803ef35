"""Qwen3-0.6B's shape on a CPU, row by row of number formats, each beside what it has to keep up with.

`python -m benchmarks.cpu_rows --llama-python PYTHON` (which has llama_cpp and gguf) prints tokens a second and ratios:
files that llama.cpp writes beside llama.cpp itself, and other formats, and a mixture of 8 experts, beside this
project's own GGUF type of as many bits, with embeddings in 16 bits where theirs are. Both of a row are loaded at once
and measured in turn; figures are medians.
`ATEN_CPU_CAPABILITY=avx2`, and a llama.cpp compiled for it, measures what a processor without AVX-512 gets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.cpu import OWN, PEER, Candidate, Rate, processor
from benchmarks.cpu_files import EXPERTS, SHAPE, WIDE
from benchmarks.cpu_systems import MAX_STREAMS


@dataclass(frozen=True)
class Side:
    """A system with a file that llama.cpp writes (`type`), or with this project's random weights in `shape`."""

    system: str = OWN
    type: str = ""
    shape: str = SHAPE
    dtype: str = ""


def _beside_llama_cpp(type: str, shape: str = SHAPE) -> tuple[Side, Side]:
    return Side(OWN, type, shape), Side(PEER, type, shape)


def _beside_file(type: str, /, **own: str) -> tuple[Side, Side]:
    return Side(**own), Side(OWN, type)


ROWS: Mapping[str, tuple[Side, Side]] = MappingProxyType(
    {
        "q8_0": _beside_llama_cpp("q8_0"),
        "q4_0": _beside_llama_cpp("q4_0"),
        "q4_k_m": _beside_llama_cpp("q4_k_m"),
        "bf16": _beside_llama_cpp("bf16"),
        "awq": _beside_file("q4_0" + WIDE, shape=f"{SHAPE}-awq"),
        "gptq": _beside_file("q4_0" + WIDE, shape=f"{SHAPE}-gptq"),
        "int8": _beside_file("q8_0" + WIDE, shape=f"{SHAPE}-int8"),
        "fp8": _beside_file("q8_0" + WIDE, shape=f"{SHAPE}-fp8"),
        "float16": _beside_file("bf16", dtype="float16"),
        "experts-bf16": _beside_file("bf16", shape=EXPERTS),
        "experts-q4_k_m": _beside_file("q4_k_m", type="q4_k_m", shape=EXPERTS),
    }
)


@dataclass(frozen=True)
class Measure:
    """Of a row: `figure` of `Rate`."""

    name: str
    figure: Callable[[Rate], float]
    streams: int
    prompt: int
    answer: int


def measures(answer: int) -> tuple[Measure, ...]:
    return (
        Measure("one", lambda rate: rate.decode, 1, 32, answer),
        Measure("eight", lambda rate: rate.decode, MAX_STREAMS, 32, answer),
        Measure("prompt", lambda rate: rate.prompt, 1, 512, 2),
    )


def run_row(sides: tuple[Side, Side], args: argparse.Namespace) -> dict[str, Any]:
    """By measure: tokens a second of both, and the first over the second."""
    candidates = [_candidate(side, args) for side in sides]
    try:
        missing = next((one.missing for one in candidates if one.missing is not None), None)
        if missing is not None:
            return {"missing": missing}
        found: dict[str, Any] = {}
        for measure in measures(args.answer):
            if measure.name not in args.measures:
                continue
            rates: list[list[float]] = [[], []]
            for turn in range(-1, args.rounds):  # the first warms up
                for of_side, candidate in zip(rates, candidates, strict=True):
                    rate = candidate.measure(measure.streams, measure.prompt, measure.answer)
                    if turn >= 0:
                        of_side.append(measure.figure(rate))
            own, peer = (statistics.median(one) for one in rates)
            found[measure.name] = {"tok_s": [round(own, 1), round(peer, 1)], "ratio": round(own / peer, 3)}
        return found
    finally:
        for candidate in candidates:
            candidate.close()


def _candidate(side: Side, args: argparse.Namespace) -> Candidate:
    options: dict[str, Any] = {"format": side.dtype, "threads": args.threads}
    if side.type:
        options["file"] = _file(side, args)
    if side.system == PEER:
        options["flash_attention"] = True
    else:
        options["shape"] = side.shape
    return Candidate(args.llama_python if side.system == PEER else sys.executable, side.system, args.folder, options)


def _file(side: Side, args: argparse.Namespace) -> str:
    """Written by the Python that has llama.cpp, or long there."""
    path = args.folder / f"{side.shape}-{side.type}.gguf"
    if not path.is_file():
        command = [args.llama_python, "-m", "benchmarks.cpu_files", str(args.folder), side.shape, side.type]
        made = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
        if made.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: ended with status {made.returncode}")
    return str(path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--measures", default="one,eight,prompt", help="streams at once, and a prompt's tokens")
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "minisgl-cpu", help="for models")
    parser.add_argument("--llama-python", default=sys.executable, help="the Python that has llama_cpp and gguf")
    args = parser.parse_args(arguments)
    for option, allowed in (("only", tuple(ROWS)), ("measures", tuple(one.name for one in measures(2)))):
        given = getattr(args, option).split(",")
        unknown = [name for name in given if name not in allowed]
        if unknown:
            parser.error(f"--{option} is {unknown[0]!r}; allowed: {', '.join(allowed)}")
        setattr(args, option, given)
    if args.rounds < 1 or args.threads < 1 or args.answer < 2:
        parser.error("--rounds, --threads: at least 1; --answer: at least 2")
    return args


def main() -> None:
    args = parse_arguments()
    rows: dict[str, Any] = {}
    for name in args.only:
        rows[name] = run_row(ROWS[name], args)
        print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr)
    print(json.dumps({"machine": processor(), "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
