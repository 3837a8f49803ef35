"""Tokens a second on a CPU: this project beside llama.cpp and transformers, Qwen3-0.6B's shapes with random weights.

`python -m benchmarks.cpu --json` measures what is installed and says what is missing. llama.cpp comes from PyPI's
source package, compiled for this processor, and its model file is written with `gguf`; both may live in another
environment, whose Python `--llama-python` names. The systems are loaded once and measured in turn, round by round, so
that what disturbs the machine disturbs all of them; `--gguf FILE` measures that model in both. Figures are medians
over rounds. Threads that wait for each other lose much on a busy machine: only with `--threads 1` do tokens of a
processor's second (`tok_processor_s`) say something there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_systems import MAX_STREAMS, MAX_TOKENS

OWN, PEER = "own", "llama.cpp"
OF_FILES = f"{PEER}-gguf"
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    OWN: (OWN, {"format": ""}),
    "own-float32": (OWN, {"format": "float32"}),
    **{
        f"{PEER}-{format}{'-flash' if flash else ''}": (PEER, {"format": format, "flash_attention": flash})
        for format in ("bf16", "f16", "f32")
        for flash in (False, True)
    },
    OF_FILES: (PEER, {"format": "gguf", "flash_attention": True}),
    "transformers-bfloat16": ("transformers", {"format": "bfloat16"}),
    "transformers-float32": ("transformers", {"format": "float32"}),
}


@dataclass(frozen=True)
class Rate:
    """Of one round: tokens a second of all streams together."""

    prompt: float  # of prompts, until the last of them has its first token
    decode: float  # after each stream's first token
    whole: float  # prompts included
    processor: float  # the same for a second that a thread computes, however many other programs run


class Candidate:
    """One system in a process of its own (`benchmarks.cpu_systems`). `missing`: why it cannot be measured here."""

    def __init__(self, python: str, system: str, folder: Path, options: dict[str, Any]) -> None:
        self._command = [python, "-m", "benchmarks.cpu_systems", system, str(folder), json.dumps(options)]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        said = self._read()
        self.missing: str | None = said.get("missing")
        self.description: str = said.get("ready", "")

    def measure(self, streams: int, prompt: int, answer: int) -> Rate:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"streams": streams, "prompt": prompt, "answer": answer}) + "\n")
        self._process.stdin.flush()
        said = self._read()
        after = streams * answer - len(said["first_s"])
        tokens = streams * answer
        first, end = max(said["first_s"]), said["end_s"]
        return Rate(streams * prompt / first, after / (end - first), tokens / end, tokens / said["processor_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)}: ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def run(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All figures, by candidate and number of streams."""
    found: dict[str, Any] = {}
    candidates: dict[str, Candidate] = {}
    shared = {"threads": args.threads} | ({} if args.gguf is None else {"file": str(args.gguf)})
    for name in names:
        system, options = CANDIDATES[name]
        python = args.llama_python if system == PEER else sys.executable
        candidate = Candidate(python, system, args.folder, {**options, **shared})
        if candidate.missing is None:
            candidates[name] = candidate
            found[name] = {"is": candidate.description}
        else:
            found[name] = {"missing": candidate.missing}
            print(f"{name}: not measured: {candidate.missing}", file=sys.stderr)
    for streams in args.streams:
        rates: dict[str, list[Rate]] = {name: [] for name in candidates}
        for turn in range(-1, args.rounds):  # the first warms up
            for name, candidate in candidates.items():
                rate = candidate.measure(streams, args.prompt, args.answer)
                if turn >= 0:
                    rates[name].append(rate)
        for name, of_rounds in rates.items():
            found[name][str(streams)] = {
                "decode_tok_s": round(statistics.median(one.decode for one in of_rounds), 2),
                "prompt_tok_s": round(statistics.median(one.prompt for one in of_rounds), 2),
                "whole_tok_s": round(statistics.median(one.whole for one in of_rounds), 2),
                "tok_processor_s": round(statistics.median(one.processor for one in of_rounds), 2),
                "rounds": [round(one.decode, 2) for one in of_rounds],
            }
            print(f"{streams} streams, {name}: {found[name][str(streams)]}", file=sys.stderr)
    for candidate in candidates.values():
        candidate.close()
    return found


def ratios(found: Mapping[str, Any], streams: Sequence[int]) -> dict[str, float]:
    """This project over the fastest measured llama.cpp, by number of streams and figure; empty without either."""
    peers = [name for name in found if name.startswith(PEER) and "is" in found[name]]
    if OWN not in found or not peers:
        return {}
    return {
        f"{n}_{figure}": round(found[OWN][str(n)][figure] / max(found[name][str(n)][figure] for name in peers), 3)
        for n in streams
        for figure in ("decode_tok_s", "tok_processor_s")
    }


def processor() -> str:
    """Its name and number of usable cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gguf", type=Path, help=f"a model's file: of {OWN} and {OF_FILES}")
    parser.add_argument("--only", help=f"of {', '.join(CANDIDATES)}")
    parser.add_argument("--streams", default="1,8", help=f"at once; each 1 to {MAX_STREAMS}")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "minisgl-cpu", help="for models")
    parser.add_argument("--llama-python", default=sys.executable, help="the Python that has llama_cpp and gguf")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    args = parser.parse_args(arguments)
    of_files = [OWN, OF_FILES]
    allowed = of_files if args.gguf else [name for name in CANDIDATES if name != OF_FILES]
    args.only = args.only.split(",") if args.only else allowed
    unknown = [name for name in args.only if name not in allowed]
    if unknown:
        parser.error(f"--only is {unknown[0]!r}; allowed: {', '.join(allowed)}")
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf is {str(args.gguf)!r}; allowed: a file")
    try:
        args.streams = [int(one) for one in args.streams.split(",")]
    except ValueError:
        parser.error(f"--streams is {args.streams!r}; allowed: numbers, separated by commas")
    if not all(1 <= one <= MAX_STREAMS for one in args.streams):
        parser.error(f"--streams is {args.streams}; allowed: 1 to {MAX_STREAMS}")
    if args.prompt < 1 or args.answer < 2 or args.prompt + args.answer > MAX_TOKENS:
        parser.error(f"--prompt and --answer are {args.prompt} and {args.answer}; allowed: {MAX_TOKENS} together")
    most = MAX_TOKENS // max(args.streams)
    if args.prompt > most:
        parser.error(f"--prompt is {args.prompt}; allowed: up to {most}, one step for all prompts")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads: at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    found = run(args.only, args)
    report = {"machine": processor(), "threads": args.threads, "systems": found, "ratio": ratios(found, args.streams)}
    print(json.dumps(report, indent=1) if args.json else json.dumps(report["ratio"]))


if __name__ == "__main__":
    main()
