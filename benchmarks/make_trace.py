"""Makes a trace of an online service by distributions, for `minisgl bench --trace`.

    python -m benchmarks.make_trace --requests 1000 --seed 1 --out benchmarks/traces/online-1000.jsonl

Nothing in it was recorded. Gaps between arrivals are gamma distributed with shape 0.5: requests come in bursts, with
1.4 times the spread of a Poisson process. Lengths are log-normal, many short ones and few long ones, and cut off at
limits that leave room in a context of 4,096 tokens. The same options give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BURST_SHAPE = 0.5


@dataclass(frozen=True)
class LogNormal:
    """Numbers of tokens."""

    median: float
    sigma: float  # of the logarithm
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return min(self.high, max(self.low, round(source.lognormvariate(math.log(self.median), self.sigma))))


PROMPTS = LogNormal(median=500, sigma=1.0, low=16, high=3000)
ANSWERS = LogNormal(median=160, sigma=0.9, low=4, high=900)


def make_trace(requests: int, rate: float, seed: int) -> Iterator[dict[str, Any]]:
    """`requests` arrivals at `rate` a second on average, from time 0 on."""
    source = random.Random(seed)
    at = 0.0
    for _ in range(requests):
        yield {
            "timestamp": round(at, 3),
            "input_length": PROMPTS.draw(source),
            "output_length": ANSWERS.draw(source),
        }
        at += source.gammavariate(BURST_SHAPE, 1 / (BURST_SHAPE * rate))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second [%(default)s]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.requests < 1 or not 0 < options.rate < math.inf:
        parser.error("--requests, --rate: allowed: 1 or more; above 0")
    lines = [json.dumps(arrival) for arrival in make_trace(options.requests, options.rate, options.seed)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
