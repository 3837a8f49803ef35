"""An engine whose speculation a benchmark steers: what proposes, which drafts are right and how many are verified.

Weights are random, so that what a proposer says is never right. Which drafts are right is drawn instead, each with the
same probability where all before it are: figures are those of a proposer that errs at this rate, whatever the model
says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.driver import Driver
from minisgl_backend.arrays import BoolArray, Int32Array
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import Proposer
from minisgl_backend.step import StepPlan

TOKEN_IDS = 10_000  # of prompts: below this
METHODS_OF_HOST = ("ngram",)  # what proposes then is replaced by what costs nothing

Load = Sequence[tuple[list[int], int]]  # prompts and the tokens of their answers


class AnyTokens(Proposer):
    """As many as there may be, at no cost."""

    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        return np.full(most, 7, dtype=np.int32)


class DrawnControl(DraftControl):
    """How many drafts a step verifies is decided as in service, by an acceptance that is drawn as `drawn` does: also
    of drafts that are compared while speculation is off."""

    def __init__(self, most: int, rate: float) -> None:
        super().__init__(most)
        self._rate, self._random = rate, np.random.default_rng(1)

    def note(self, row: int, uid: int, drafted: int, accepted: int) -> None:
        wrong = np.flatnonzero(self._random.random(drafted) >= self._rate)
        super().note(row, uid, drafted, int(wrong[0]) if len(wrong) else drafted)


@contextmanager
def drawn(rate: float) -> Iterator[None]:
    """Meanwhile each draft is right with this probability, where all before it are."""
    rng = np.random.default_rng(0)
    last: tuple[StepPlan | None, BoolArray] = None, np.empty(0, dtype=np.bool_)

    def accepted(plan: StepPlan, token_ids: Int32Array) -> BoolArray:
        nonlocal last
        if plan is not last[0]:  # a step is asked twice
            drafts = plan.draft_tokens
            counts, places = np.cumsum(_wrong(drafts, rng, rate)), np.arange(len(drafts))
            first = np.maximum.accumulate(np.where(drafts < 0, places, 0))
            found = np.ones(len(token_ids), dtype=np.bool_)
            found[len(token_ids) - len(drafts) :] = counts == counts[first]
            last = plan, found
        return last[1]

    with mock.patch.object(StepPlan, "accepted", accepted):
        yield


def _wrong(drafts: Int32Array, rng: np.random.Generator, rate: float) -> BoolArray:
    wrong: BoolArray = (drafts >= 0) & (rng.random(len(drafts)) >= rate)
    return wrong


@dataclass(frozen=True)
class Decoded:
    """Streams that decoded side by side."""

    tok_s: float  # of one stream
    delivered: float  # tokens a step, of one stream

    @property
    def ms(self) -> float:
        """A token of a stream, milliseconds."""
        return 1000 / self.tok_s


@dataclass(frozen=True)
class Served:
    """A load that was answered."""

    tok_s: float  # of all
    first_s: list[float]  # from submission to the first token, by request


class SteeredEngine:
    """One engine in this process, of a model folder of benchmarks.model_shapes."""

    def __init__(self, model: Path, config: dict[str, Any], context: int, **options: Any) -> None:
        """`config`: the option speculative_config; with a method of the host, what proposes costs nothing instead.
        `context`: tokens of the prompts that `decode` has."""
        self.driver = Driver(model, speculative_config=config, **options)
        self.most = self.driver.config.speculation.most_drafts  # type: ignore[union-attr]
        self._drafting: Any = self.driver.core._scheduler._drafting  # type: ignore[attr-defined]
        if config["method"] in METHODS_OF_HOST:
            self._drafting._proposer = AnyTokens()  # type: ignore[union-attr]
        self._context, self._num_cached = context, 0
        self._largest_id = min(TOKEN_IDS, self.driver.engine.welcome.vocab_size)
        rng = np.random.default_rng(0)
        for length, count in ((64, 1), (context, 8)):  # libraries load kernels at the first GEMM of a size
            self.serve([(rng.integers(0, self._largest_id, length).tolist(), 4)] * count, count, speculative=False)

    def close(self) -> None:
        self.driver.close()

    def steer(self, control: DraftControl) -> None:
        """From now on this says how many drafts a step verifies."""
        self._drafting._control = control
        if self._drafting._steps is not None:
            self._drafting._steps._control = control

    def fits(self, batch: int, tokens: int) -> bool:
        """Whether `decode` has pages for all its streams, and rows."""
        welcome = self.driver.engine.welcome
        pages = batch * -(-(self._context + tokens) // welcome.page_size)
        return pages <= welcome.num_pages and batch <= self.driver.config.max_running_requests

    def decode(self, batch: int, tokens: int, *, speculative: bool) -> Decoded:
        """So many streams at once, of so many tokens behind a prompt that is cached."""
        prompts = [self._prompt(index) for index in range(batch)]
        if batch > self._num_cached:
            self.serve([(prompt, 1) for prompt in prompts], batch, speculative=False)
            self._num_cached = batch
        driver = self.driver
        before = driver.core.stats().speculation
        for prompt in prompts:
            driver.submit(prompt, tokens, speculative=speculative)
        driver.run()
        stamps = [timeline.tokens for timeline in driver.timelines.values()]
        driver.clear()
        seconds = max(one[-1] for one in stamps) - min(one[0] for one in stamps)
        accepted = sum(driver.core.stats().speculation.accepted) - sum(before.accepted)
        return Decoded((tokens - 1) / seconds, tokens / (tokens - accepted / batch))

    def serve(self, load: Load, streams: int, *, speculative: bool, temperature: float = 0.0) -> Served:
        """Answers a load, `streams` requests at a time: where one ends, the next comes."""
        driver, waiting = self.driver, list(reversed(load))
        started = time.perf_counter()
        running: list[int] = []
        while waiting or running:
            running = [uid for uid in running if not driver.timelines[uid].done]
            while waiting and len(running) < streams:
                prompt, tokens = waiting.pop()
                running.append(driver.submit(prompt, tokens, temperature, speculative=speculative))
            driver.step()
        seconds = time.perf_counter() - started
        first = [timeline.tokens[0] - timeline.submitted for timeline in driver.timelines.values()]
        driver.clear()
        return Served(sum(tokens for _, tokens in load) / seconds, first)

    def load(self, lengths: Sequence[tuple[int, int]], seed: int) -> Load:
        """Requests of these prompt and answer lengths; another seed has other tokens, which no prefix cache knows."""
        rng = np.random.default_rng((1, seed))
        return [(rng.integers(0, self._largest_id, prompt).tolist(), answer) for prompt, answer in lengths]

    def _prompt(self, index: int) -> list[int]:
        tokens: list[int] = np.random.default_rng((2, index)).integers(0, self._largest_id, self._context).tolist()
        return tokens
