"""The demo gauge: held-out questions to a demo model, right answers counted. A broken cache shows as a wrong one.

    python -m benchmarks.gauge                                  through the running server (gRPC, 127.0.0.1:8001)
    python -m benchmarks.gauge --in-process page_size=16 ...    through an engine of its own with these options
    python -m benchmarks.gauge --model demo-vl ...              of the one with eyes, about images

`--per-kind 500` is the full gauge; `--json` prints one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from benchmarks import demo_sights, demo_tasks

Messages = Sequence[dict[str, Any]]
Answer = Callable[[Sequence[Messages], int], list[str]]  # (conversations, max_tokens) -> replies, greedy


class Asked(Protocol):
    """A question with its right answer."""

    @property
    def kind(self) -> str: ...
    @property
    def messages(self) -> Messages: ...
    def is_right(self, text: str) -> bool: ...


Question = TypeVar("Question", bound=Asked)


@dataclass(frozen=True)
class Tasks(Generic[Question]):
    """What a demo model is asked."""

    kinds: Sequence[str]
    questions: Callable[[str, int, int], list[Question]]  # (kind, number, seed)
    max_tokens: int  # room for every answer


TASKS = Tasks(demo_tasks.KINDS, demo_tasks.questions, demo_tasks.MAX_TOKENS)
SIGHTS = Tasks(demo_sights.KINDS, demo_sights.questions, demo_sights.MAX_TOKENS)
_OF_MODEL: Mapping[str, Tasks[Any]] = MappingProxyType({"demo": TASKS, "demo-vl": SIGHTS})


def run_gauge(answer: Answer, per_kind: int, seed: int = 0, tasks: Tasks[Any] = TASKS) -> dict[str, float]:
    """Share of right answers by kind. `answer` gets all questions at once, so that they run as one load."""
    asked = ask_of(tasks, per_kind, seed)
    replies = answer([question.messages for question in asked], tasks.max_tokens)
    right = dict.fromkeys(tasks.kinds, 0)
    for question, reply in zip(asked, replies, strict=True):
        right[question.kind] += question.is_right(reply)
    return {kind: right[kind] / per_kind for kind in tasks.kinds}


def ask(per_kind: int, seed: int = 0) -> list[demo_tasks.Question]:
    """The demo model's questions."""
    return ask_of(TASKS, per_kind, seed)


def ask_of(tasks: Tasks[Question], per_kind: int, seed: int = 0) -> list[Question]:
    """The gauge's questions, kinds interleaved so that short and long answers share the batch."""
    by_kind = [tasks.questions(kind, per_kind, seed) for kind in tasks.kinds]
    return [question for group in zip(*by_kind, strict=True) for question in group]


def answer_in_process(options: dict[str, Any]) -> tuple[Answer, Callable[[], None]]:
    """An engine of its own with these options, and what closes it."""
    from minisgl_backend import LLM, SamplingParams

    llm = LLM(**options)

    def answer(conversations: Sequence[Messages], max_tokens: int) -> list[str]:
        results = llm.chat([list(one) for one in conversations], SamplingParams(temperature=0.0, max_tokens=max_tokens))
        return [result.text for result in results]

    return answer, llm.close


def answer_through_server(url: str, concurrency: int) -> Answer:
    """The running server, by the asyncio client."""
    from client import AsyncClient

    async def run(conversations: Sequence[Messages], max_tokens: int) -> list[str]:
        gate = asyncio.Semaphore(concurrency)
        async with AsyncClient(url) as client:

            async def one(messages: Messages) -> str:
                async with gate:
                    result = await client.generate(messages=list(messages), max_tokens=max_tokens, temperature=0.0)
                    return result.text

            return await asyncio.gather(*(one(messages) for messages in conversations))

    return lambda conversations, max_tokens: asyncio.run(run(conversations, max_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(_OF_MODEL), default="demo", help="which one answers")
    parser.add_argument("--per-kind", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in-process", nargs="*", metavar="OPTION=VALUE", help="engine options, instead of a server")
    arguments = parser.parse_args()
    close: Callable[[], None] = lambda: None  # noqa: E731
    if arguments.in_process is None:
        answer = answer_through_server(arguments.url, arguments.concurrency)
    else:
        from minisgl_backend.config import OPTIONS

        pairs = dict(item.split("=", 1) for item in arguments.in_process)
        answer, close = answer_in_process(
            {name: OPTIONS[name].parse(text) for name, text in pairs.items()} | {"model": arguments.model}
        )
    try:
        shares = run_gauge(answer, arguments.per_kind, arguments.seed, _OF_MODEL[arguments.model])
    finally:
        close()
    for kind, share in shares.items():
        print(f"{kind:12} {100 * share:6.1f}%  of {arguments.per_kind}")
    if arguments.json:
        print(json.dumps({"demo_gauge": shares, "worst": min(shares.values()), "per_kind": arguments.per_kind}))


if __name__ == "__main__":
    main()
