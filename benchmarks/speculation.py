"""Speculation on a real model: delivered tokens a step, and the time with and without, turn by turn.

    python -m benchmarks.speculation --model FOLDER
    python -m benchmarks.speculation --model demo --kinds gauge --every-draft \\
        --speculative-config '{"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4}'

Delivered tokens a step are accepted drafts plus the model's own token, in steps of the model. Both engines are in this
process and answer each prompt one after the other, first the one and then the other, so that other load on the machine
meets both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from benchmarks import demo_tasks
from benchmarks.speculation_prompts import FREE, REPEATING
from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.speculative_config import read_speculative_config
from tests.proposers import verify_every_draft

Conversation = list[dict[str, str]]
PROMPTS = {"repeating": REPEATING, "free": FREE}
GAUGE = "gauge"  # all kinds of questions that the demo model has learned
QUESTIONS_SEED = 7


def conversations(kind: str, count: int) -> list[Conversation]:
    """At most `count` prompts of a kind."""
    if kind in demo_tasks.KINDS:
        return [question.messages for question in demo_tasks.questions(kind, count, QUESTIONS_SEED)]
    return [[{"role": "user", "content": prompt}] for prompt in PROMPTS[kind][:count]]


def measure(plain: LLM, drafting: LLM, prompts: Sequence[Conversation], max_tokens: int) -> dict[str, float]:
    """Figures of these prompts, each asked alone and greedily."""
    ratios, processor_ratios, tokens, same, seconds = [], [], 0, 0, [0.0, 0.0]
    before = drafting.stats.speculation
    for number, prompt in enumerate(prompts):
        answers, times, processor_times = {}, {}, {}
        order = [(0, plain), (1, drafting)]
        for which, llm in order if number % 2 else reversed(order):
            started, processor_started = time.perf_counter(), time.process_time()
            (answer,) = llm.chat([prompt], temperature=0.0, max_tokens=max_tokens)
            times[which] = time.perf_counter() - started
            processor_times[which] = time.process_time() - processor_started
            seconds[which] += times[which]
            answers[which] = answer.token_ids
            if which == 1:
                tokens += len(answer.token_ids)
        same += answers[0] == answers[1]
        ratios.append(times[0] / times[1])
        processor_ratios.append(processor_times[0] / processor_times[1])
    after = drafting.stats.speculation
    drafted, accepted = (
        sum(a) - sum(b) for a, b in ((after.drafted, before.drafted), (after.accepted, before.accepted))
    )
    steps = tokens - accepted  # of which the first of each answer has the prompt, and no drafts
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
        # By the processor's time, which other work on the machine changes little where torch has one thread.
        "processor_speedup": round(statistics.median(processor_ratios), 3),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    kinds = (*PROMPTS, *demo_tasks.KINDS)
    parser.add_argument("--kinds", default=",".join(PROMPTS), help=f"of {', '.join(kinds)}; {GAUGE}: the last seven")
    parser.add_argument("--every-draft", action="store_true", help="all that is proposed is verified, whether it pays")
    parser.add_argument("--speculative-config", default='{"method": "ngram"}')
    options = parser.parse_args(arguments)
    asked = demo_tasks.KINDS if options.kinds == GAUGE else options.kinds.split(",")
    if unknown := set(asked) - set(kinds):
        parser.error(f"--kinds has {', '.join(unknown)}; allowed: {', '.join(kinds)}, or {GAUGE}")
    shared = {
        "environment": Environment(overlap=None, log_level="WARNING", flashinfer_tensor_cores=None),
        "dtype": options.dtype,
        "max_running_requests": 8,
    }
    with (
        LLM(options.model, num_pages=256, **shared) as plain,
        LLM(options.model, num_pages=256, speculative_config=options.speculative_config, **shared) as drafting,
    ):
        if options.every_draft:
            verify_every_draft(drafting, read_speculative_config(options.speculative_config).most_drafts)
        measure(plain, drafting, conversations("repeating", 1), 16)  # what is slow the first time
        found = {}
        for kind in asked:
            found[kind] = measure(plain, drafting, conversations(kind, options.prompts), options.max_tokens)
            print(json.dumps({"kind": kind, **found[kind]}), flush=True)
        if options.kinds == GAUGE:
            delivered = {kind: figures["delivered_tokens_a_step"] for kind, figures in found.items()}
            others = [figure for kind, figure in delivered.items() if kind != "arithmetic"]
            means = {"mean": statistics.mean(delivered.values()), "mean_without_arithmetic": statistics.mean(others)}
            print(json.dumps({name: round(mean, 3) for name, mean in means.items()}))


if __name__ == "__main__":
    main()
