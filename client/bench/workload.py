"""A benchmark's requests and their times: lengths, prompts, and three arrival patterns."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from .trace import Arrival

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country hand".split()
)
_FRESH = random.SystemRandom()
_FEW_WORDS, _MANY_WORDS = 8, 200
_PROBES = 3  # prompts of each of the two probe lengths


@dataclass(frozen=True)
class Lengths:
    """Token counts, uniformly distributed from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """`N`, or `LOW-HIGH`. Raises ValueError, which names the option."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise ValueError(f"{option} is {text!r}; allowed: tokens, as 128 or 64-256, from 1")
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Question:
    """One request."""

    prompt: str
    output_tokens: int
    at: float | None = None  # seconds after the run's start; None: as soon as the concurrency allows
    images: tuple[str, ...] = ()  # data URLs


@dataclass(frozen=True)
class Load:
    """One run: its requests, and how many are in flight at once (None: as they arrive)."""

    label: dict[str, Any]  # the run's name in reports: {"concurrency": 8}, {"rate": 4.0} or {"trace": "FILE"}
    questions: Sequence[Question]
    concurrency: int | None = None


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of random words that a server counts as about `num_tokens` tokens."""

    tokens_per_word: float
    fixed_tokens: float  # independent of the words: a number before them, a chat template, a BOS token

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.fixed_tokens) / self.tokens_per_word))

    def make(self, source: random.Random, num_tokens: int) -> str:
        return make_prompt(source, self.num_words(num_tokens))


def make_prompt(source: random.Random, num_words: int) -> str:
    """Random words; the first one is a number.

    The number is fresh, whatever the seed: otherwise the next benchmark's prompts would be in the server's prefix
    cache.
    """
    return " ".join([str(_FRESH.randrange(10**5, 10**6)), *source.choices(_WORDS, k=num_words - 1)])


async def fit_prompt_maker(count: Callable[[str], Awaitable[int | None]], longest: int) -> PromptMaker:
    """Finds the tokens per word by the server's own counts; `count` asks it and returns None if it does not report
    them.

    Without counts, each word is taken as one token. `longest`: approximate length of the longest probe.
    """
    source = random.Random(0)

    async def mean(num_words: int) -> float | None:
        counts = [await count(make_prompt(source, num_words)) for _ in range(_PROBES)]
        known = [number for number in counts if number is not None]
        return sum(known) / len(known) if known else None

    few = await mean(_FEW_WORDS)
    num_many = max(2 * _FEW_WORDS, min(_MANY_WORDS, longest // 2))
    many = await mean(num_many)
    if few is None or many is None:
        return PromptMaker(1.0, 0.0)
    per_word = max((many - few) / (num_many - _FEW_WORDS), 0.1)
    return PromptMaker(per_word, few - per_word * _FEW_WORDS)


class _Sources:
    """Separate random generators: the number of words that a server needs for a length must not change other
    requests."""

    def __init__(self, seed: str) -> None:
        self.lengths, self.gaps, self.words = (random.Random(f"{seed} {name}") for name in ("lengths", "gaps", "words"))


def closed_load(
    concurrency: int, requests: int, inputs: Lengths, outputs: Lengths, maker: PromptMaker, seed: int
) -> Load:
    """A constant `concurrency` of requests in flight: the next is sent when one has ended."""
    sources = _Sources(f"{seed} {concurrency}")
    questions = []
    for _ in range(requests):
        prompt, answer = inputs.draw(sources.lengths), outputs.draw(sources.lengths)
        questions.append(Question(maker.make(sources.words, prompt), answer))
    return Load({"concurrency": concurrency}, questions, concurrency)


def poisson_load(rate: float, requests: int, inputs: Lengths, outputs: Lengths, maker: PromptMaker, seed: int) -> Load:
    """Independent requests: `rate` a second on average, with exponential gaps.

    The same seed gives the same requests in the same order at every rate, with longer or shorter gaps. Lengths and
    times are the same for every server.
    """
    sources = _Sources(str(seed))
    questions, at = [], 0.0
    for _ in range(requests):
        prompt, answer = inputs.draw(sources.lengths), outputs.draw(sources.lengths)
        questions.append(Question(maker.make(sources.words, prompt), answer, at))
        at += sources.gaps.expovariate(1.0) / rate
    return Load({"rate": rate}, questions)


def trace_load(name: str, arrivals: Sequence[Arrival], maker: PromptMaker, seed: int) -> Load:
    """The trace's times and lengths, with random words."""
    words = _Sources(str(seed)).words
    questions = [Question(maker.make(words, one.input_tokens), one.output_tokens, one.at) for one in arrivals]
    return Load({"trace": name}, questions)


def warm_up_load(load: Load, requests: int, seed: int) -> Load:
    """`requests` requests of the same lengths (repeated if there are more) with other words.

    In flight are as many as in the load, or all.
    """
    source = random.Random(f"warm-up {seed}")
    like = islice(cycle(load.questions), requests)
    questions = [Question(make_prompt(source, len(one.prompt.split())), one.output_tokens) for one in like]
    return Load(load.label, questions, load.concurrency or max(1, requests))
