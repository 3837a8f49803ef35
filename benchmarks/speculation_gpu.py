"""What drafts are worth on a GPU: shapes of a known model with random weights, and a proposer that costs nothing.

    python -m benchmarks.speculation_gpu --shape qwen3-14b
    python -m benchmarks.speculation_gpu --shape qwen3-14b --draft-shape qwen3-0.6b  # a model that proposes, really run
    python -m benchmarks.speculation_gpu --shape glm-4.7-flash --mtp  # the checkpoint's own layer, really run

Which drafts are right is drawn, each with the same probability where all before it are; so the figures are those of a
proposer that errs at this rate, whatever the model says. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_shapes import make_folder
from minisgl_backend import LLM
from minisgl_backend.arrays import BoolArray, Int32Array
from minisgl_backend.environment import Environment
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import Proposer
from minisgl_backend.step import StepPlan
from tests.proposers import EveryDraft

PROMPT, TOKENS = 512, 256


class AnyTokens(Proposer):
    """As many as there may be."""

    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        return np.full(most, 7, dtype=np.int32)


def draw(rate: float) -> None:
    """From now on drafts are right with this probability each."""
    rng = np.random.default_rng(0)

    def accepted(plan: StepPlan, token_ids: Int32Array) -> BoolArray:
        found = np.ones(len(token_ids), dtype=np.bool_)
        if len(plan.draft_tokens):
            first = len(token_ids) - len(plan.draft_tokens)
            right = rng.random(len(plan.draft_tokens)) < rate
            for place, draft in enumerate(plan.draft_tokens.tolist()):
                found[first + place] = draft < 0 or (found[first + place - 1] and right[place])
        return found

    StepPlan.accepted = accepted  # type: ignore[assignment, method-assign]


def measure(llm: LLM, batch: int, control: DraftControl | None) -> tuple[float, float]:
    """Tokens a second of a stream, and delivered tokens a step of it. None: without speculation."""
    drafting: Any = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
    if control is not None:
        drafting._control = control
        if drafting._steps is not None:
            drafting._steps._control = control
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(0, 10000, PROMPT).tolist() for _ in range(batch)]
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "speculative": control is not None}
    llm.generate(prompts, max_tokens=1, **options)  # the prompts are cached then
    best, delivered = 0.0, 0.0
    for _ in range(2):
        before, started = llm.stats, time.perf_counter()
        llm.generate(prompts, max_tokens=TOKENS, **options)
        rate = TOKENS / (time.perf_counter() - started)
        if rate > best:
            accepted = sum(llm.stats.speculation.accepted) - sum(before.speculation.accepted)
            best, delivered = rate, TOKENS / (TOKENS - accepted / batch)
    return best, delivered


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-14b")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--draft-shape", help="of a model that proposes; unset: what proposes costs nothing")
    parser.add_argument("--mtp", action="store_true", help="the shape's own layer for further tokens proposes")
    options = parser.parse_args(arguments)
    runs_proposer = options.mtp or options.draft_shape is not None
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": options.drafts}
    environment = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None)
    shared: dict[str, Any] = {"max_running_requests": 64, "attention_backend": options.backend}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_folder(options.shape, Path(folder)))
        if options.draft_shape:
            config |= {"method": "draft_model", "model": str(make_folder(options.draft_shape, Path(folder)))}
        elif options.mtp:
            config |= {"method": "mtp"}
        with LLM(model, environment=environment, dummy_weights=True, speculative_config=config, **shared) as llm:
            if not runs_proposer:
                llm.engine.core._scheduler._drafting._proposer = AnyTokens()  # type: ignore[attr-defined]
            for batch in options.batches:
                plain, _ = measure(llm, batch, None)
                for name, rate, control in (
                    ("all right", 1.0, EveryDraft(options.drafts)),
                    ("about 3 delivered", 0.745, EveryDraft(options.drafts)),
                    ("all wrong, every draft verified", 0.0, EveryDraft(options.drafts)),
                    ("about 3 delivered, as served", 0.745, DraftControl(options.drafts)),
                    ("all wrong, as served", 0.0, DraftControl(options.drafts)),
                ):
                    draw(rate)
                    found, delivered = measure(llm, batch, control)
                    figures = {"tok_s": round(found, 1), "delivered": round(delivered, 2)}
                    if runs_proposer:
                        (proposing,) = control._proposing.of([options.drafts])
                        figures["proposing_ms"] = round(1e3 * float(proposing), 3)
                    figures |= {"plain_tok_s": round(plain, 1), "speedup": round(found / plain, 3)}
                    print(json.dumps({"batch": batch, "drafts": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
