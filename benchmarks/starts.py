"""How long starts take from disk, by number format: from a process's start to its first token.

    python -m benchmarks.starts [--models qwen3-14b,qwen3-14b-fp8,qwen3-14b-awq] [--rounds 2] [--json]

Random checkpoints are written first, so the page cache holds them where memory has the room. Each model starts once
more than it is timed, since compiled kernels and measured choices are kept from then on; timed starts go in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu import MODELS, describe_machine
from benchmarks.model_shapes import SHAPES, make_folder

DEFAULT = "qwen3-14b,qwen3-14b-fp8,qwen3-14b-awq,qwen3-14b-gptq"
START = """
import sys, time
from minisgl_backend import LLM
llm = LLM(model=sys.argv[1])
llm.generate([[1, 2, 3]], max_tokens=1)
print(time.time())
"""


def seconds_to_first_token(folder: Path) -> float:
    """Of one process, without its end."""
    started = time.time()
    process = subprocess.run([sys.executable, "-c", START, str(folder)], check=True, stdout=subprocess.PIPE)
    return round(float(process.stdout.split()[-1]) - started, 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=DEFAULT, help="of benchmarks.model_shapes, the first is the base")
    parser.add_argument("--rounds", type=int, default=2, help="timed starts of each; the quickest counts")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--models is {unknown[0]!r}; allowed: {', '.join(SHAPES)}")
    folders = {name: make_folder(name, MODELS, weights=True) for name in names}
    first = {name: seconds_to_first_token(folder) for name, folder in folders.items()}
    rounds = [{name: seconds_to_first_token(folder) for name, folder in folders.items()} for _ in range(options.rounds)]
    results = {}
    for name, folder in folders.items():
        best = min(each[name] for each in rounds)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
        results[name] = {"file_gb": round(size, 2), "first_start_s": first[name], "start_s": best}
        print(f"{name:24} {size:6.2f} GB  first start {first[name]:6.1f} s  start {best:6.1f} s", flush=True)
    if options.json:
        print(json.dumps({**results, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
