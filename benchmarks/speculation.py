"""Speculation on a real model: delivered tokens a step, and the time with and without, turn by turn.

    python -m benchmarks.speculation --model FOLDER

Delivered tokens a step are accepted drafts plus the model's own token. Both engines are in this process and answer each
prompt one after the other, first the one and then the other, so that other load on the machine meets both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from benchmarks.speculation_prompts import FREE, REPEATING
from minisgl_backend import LLM
from minisgl_backend.environment import Environment

KINDS = {"repeating": REPEATING, "free": FREE}


def measure(plain: LLM, drafting: LLM, prompts: Sequence[str], max_tokens: int) -> dict[str, float]:
    """Figures of these prompts, each asked alone and greedily."""
    ratios, tokens, steps, same, seconds = [], 0, 0, 0, [0.0, 0.0]
    before = drafting.stats.speculation
    for number, prompt in enumerate(prompts):
        answers, times = {}, {}
        order = [(0, plain), (1, drafting)]
        for which, llm in order if number % 2 else reversed(order):
            first_step, started = llm.stats.step, time.perf_counter()
            (answer,) = llm.chat([[{"role": "user", "content": prompt}]], temperature=0.0, max_tokens=max_tokens)
            times[which] = time.perf_counter() - started
            seconds[which] += times[which]
            answers[which] = answer.token_ids
            if which == 1:
                tokens += len(answer.token_ids)
                steps += llm.stats.step - first_step
        same += answers[0] == answers[1]
        ratios.append(times[0] / times[1])
    after = drafting.stats.speculation
    drafted, accepted = (
        sum(a) - sum(b) for a, b in ((after.drafted, before.drafted), (after.accepted, before.accepted))
    )
    return {
        "prompts": len(prompts),
        "same_texts": same,
        "tokens": tokens,
        "steps": steps,
        "delivered_tokens_a_step": round(tokens / steps, 3),
        "drafted": drafted,
        "accepted": accepted,
        "speedup": round(seconds[0] / seconds[1], 3),
        "speedup_median": round(statistics.median(ratios), 3),
        "speedup_least": round(min(ratios), 3),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    parser.add_argument("--speculative-config", default='{"method": "ngram"}')
    options = parser.parse_args(arguments)
    shared = {
        "environment": Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None),
        "dtype": options.dtype,
        "max_running_requests": 8,
    }
    with (
        LLM(options.model, num_pages=256, **shared) as plain,
        LLM(options.model, num_pages=256, speculative_config=options.speculative_config, **shared) as drafting,
    ):
        measure(plain, drafting, REPEATING[:1], 16)  # what is slow the first time
        for kind, prompts in KINDS.items():
            figures = measure(plain, drafting, prompts[: options.prompts], options.max_tokens)
            print(json.dumps({"kind": kind, **figures}), flush=True)


if __name__ == "__main__":
    main()
