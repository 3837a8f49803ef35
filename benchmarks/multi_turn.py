"""Conversations of several turns, each sent again whole with its history: what the prefix cache saves.

    python -m benchmarks.multi_turn [--conversations 16] [--turns 10] [--json]

All conversations run at once; each sends its next turn when the answer to the last one is complete. The same load is
run with the radix cache and with the naive one. `--json` prints one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.demo_tasks import Turn, arithmetic_turn, counting_turn, repeat_turn, reverse_turn
from minisgl_backend import LLM, SamplingParams
from minisgl_backend.config import CACHE_TYPES
from minisgl_backend.environment import Environment
from minisgl_backend.request import Request
from minisgl_backend.text.detokenizer import Detokenizer, new_detokenizer
from minisgl_backend.text.vocabulary import Vocabulary, load_vocabulary

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
MAX_ANSWER = 400  # tokens
LONGEST_COUNT = 20  # numbers


@dataclass(frozen=True)
class Figures:
    """One run."""

    prompt_tokens: int  # of all turns, history included
    prefill_tokens: int  # of these, computed
    first_token_ms: float  # median over turns, from sending a turn to its first token
    first_token_p99_ms: float
    right: float  # share of turns answered right, in numbers from 0 to 1
    seconds: float


@dataclass
class _Conversation:
    """One user: the turns to come, the messages so far, and the turn that is being answered."""

    turns: Iterator[Turn]
    messages: list[dict[str, str]] = field(default_factory=lambda: [SYSTEM])
    turn: Turn | None = None
    detokenizer: Detokenizer | None = None
    text: str = ""
    sent_at: float = 0.0
    heard: bool = False  # the first token of this turn


def make_turns(count: int, rng: Random) -> list[Turn]:
    """Turns that the demo model can answer, some 60 to 150 tokens each with their answers."""
    makers = (repeat_turn, reverse_turn, arithmetic_turn, lambda r: counting_turn(r, span=LONGEST_COUNT))
    return [rng.choice(makers)(rng) for _ in range(count)]


class MultiTurn:
    """The load on one engine."""

    def __init__(self, llm: LLM, num_conversations: int, num_turns: int) -> None:
        self._llm = llm
        self._vocabulary: Vocabulary = load_vocabulary(llm.engine.model_dir)
        self._open: dict[int, _Conversation] = {}  # by uid of the request that is being answered
        self._conversations = [
            _Conversation(iter(make_turns(num_turns, Random(index)))) for index in range(num_conversations)
        ]
        self._next_uid = 0
        self._first_token_s: list[float] = []
        self._right: list[bool] = []

    def run(self) -> Figures:
        """Until the last conversation has ended."""
        core = self._llm.engine.core
        begin = time.perf_counter()
        for conversation in self._conversations:
            self._send_next(conversation)
        while self._open:
            core.step()
            outputs = core.drain_outputs()
            if outputs is None:
                continue
            now = time.perf_counter()
            records = zip(outputs.uids.tolist(), outputs.token_ids.tolist(), outputs.reasons.tolist(), strict=True)
            for uid, token, reason in records:
                self._hear(uid, token, bool(reason), now)
        stats = core.stats()
        waits_ms = np.array(self._first_token_s) * 1000
        return Figures(
            prompt_tokens=stats.total_prompt_tokens,
            prefill_tokens=stats.total_prompt_tokens - stats.total_cached_tokens,
            first_token_ms=float(np.median(waits_ms)),
            first_token_p99_ms=float(np.percentile(waits_ms, 99)),
            right=sum(self._right) / len(self._right),
            seconds=time.perf_counter() - begin,
        )

    def _send_next(self, conversation: _Conversation) -> None:
        turn = conversation.turn = next(conversation.turns, None)
        if turn is None:
            return
        conversation.messages.append({"role": "user", "content": turn.user})
        conversation.detokenizer, conversation.text = new_detokenizer(self._vocabulary), ""
        conversation.heard, conversation.sent_at = False, time.perf_counter()
        tokenizer = self._llm.tokenizer
        prompt = tokenizer.encode(tokenizer.render(conversation.messages), add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER)
        token_ids = np.array(prompt, dtype="<i4").tobytes()
        self._llm.engine.core.submit(Request(uid=self._next_uid, token_ids=token_ids, params=params))
        self._open[self._next_uid] = conversation
        self._next_uid += 1

    def _hear(self, uid: int, token: int, ended: bool, now: float) -> None:
        conversation = self._open[uid]
        assert conversation.turn is not None, "an open conversation has a turn"
        assert conversation.detokenizer is not None, "an open conversation has a stream"
        if not conversation.heard:
            conversation.heard = True
            self._first_token_s.append(now - conversation.sent_at)
        conversation.text += conversation.detokenizer.feed([token]) if token >= 0 else ""
        if not ended:
            return
        del self._open[uid]
        conversation.text += conversation.detokenizer.finish()
        conversation.messages.append({"role": "assistant", "content": conversation.text})
        self._right.append(conversation.text.strip() == conversation.turn.assistant)
        self._send_next(conversation)


def measure(cache_type: str, num_conversations: int, num_turns: int, **options: Any) -> Figures:
    """The load with one kind of prefix cache."""
    with LLM("demo", cache_type=cache_type, environment=Environment.read(), **options) as llm:
        llm.generate("warm up", max_tokens=4)
        before = llm.stats
        figures = MultiTurn(llm, num_conversations, num_turns).run()
    warm_up = before.total_prompt_tokens
    return Figures(
        **{
            **figures.__dict__,
            "prompt_tokens": figures.prompt_tokens - warm_up,
            "prefill_tokens": figures.prefill_tokens - warm_up,
        }
    )


def report(figures: dict[str, Figures]) -> dict[str, Any]:
    """The figures of both caches, and how many times less the radix cache needs."""
    radix, naive = figures["radix"], figures["naive"]
    return {
        "multi_turn": {name: one.__dict__ for name, one in figures.items()},
        "prefill_ratio": naive.prefill_tokens / radix.prefill_tokens,
        "first_token_ratio": naive.first_token_ms / radix.first_token_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {name: measure(name, arguments.conversations, arguments.turns) for name in CACHE_TYPES}
    print(
        f"{'cache':6} {'prompt tokens':>14} {'computed':>9} {'first token':>12} {'p99':>9} {'right':>7} {'seconds':>8}"
    )
    for name, one in figures.items():
        print(
            f"{name:6} {one.prompt_tokens:14,} {one.prefill_tokens:9,} {one.first_token_ms:9.0f} ms "
            f"{one.first_token_p99_ms:6.0f} ms {100 * one.right:6.1f}% {one.seconds:8.1f}"
        )
    result = report(figures)
    print(
        f"radix computes {result['prefill_ratio']:.1f} times fewer prompt tokens; "
        f"its first token comes {result['first_token_ratio']:.1f} times sooner"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
