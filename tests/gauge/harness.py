"""Questions asked of an engine, and an engine driven step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.demo_tasks import KINDS, MAX_TOKENS, Question, questions
from benchmarks.gauge import ask
from minisgl_backend import LLM, SamplingParams
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.environment import Environment
from minisgl_backend.llm import RequestOutput
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.scheduler.admission import HISTORY
from tests.gauge.cells import BASELINE, STARVED_REQUESTS, STARVED_SEQUENCES, Cell

SHORT_ANSWER, SHORT_HISTORY = 80, 600  # characters; for the short run
QUICK_KINDS = ("arithmetic", "repeat")
POOL_TOKENS = 16384  # small pools make quick starts

GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def short_questions(per_kind: int, kinds: Sequence[str] = KINDS, longest: int = SHORT_ANSWER) -> list[Question]:
    """Questions with answers of at most `longest` characters and little history, kinds interleaved."""
    by_kind = []
    for kind in kinds:
        pool = (one for one in questions(kind, 30 * per_kind, seed=1) if _is_short(one, longest))
        by_kind.append([one for one, _ in zip(pool, range(per_kind), strict=False)])
    return [question for group in zip(*by_kind, strict=True) for question in group]


def quick_questions() -> list[Question]:
    """Enough for the starved cells, and quickly answered although few run at a time."""
    return short_questions(STARVED_REQUESTS // len(QUICK_KINDS), QUICK_KINDS, SHORT_ANSWER // 2)


def full_questions(per_kind: int) -> list[Question]:
    """The gauge's own."""
    return ask(per_kind)


def starved_questions() -> list[Question]:
    """Answers of every length to short histories: one long prompt would fill the pool and run alone."""
    return [question for question in ask(50) if _history(question) <= SHORT_HISTORY][:STARVED_REQUESTS]


def _is_short(question: Question, longest: int) -> bool:
    return len(question.answer) <= longest and _history(question) <= SHORT_HISTORY


def _history(question: Question) -> int:
    """Characters of a question's messages."""
    return sum(len(message["content"]) for message in question.messages)


@contextmanager
def engine(
    *,
    model: str = "demo",
    overlap: bool = True,
    eager_graphs: bool = False,
    tokens: int | None = POOL_TOKENS,
    **options: Any,
) -> Iterator[LLM]:
    """An engine on the demo model, or another, float32, with `options` on top of the baseline's.

    `tokens`: what the KV pool holds where num_pages is not given; None: as many as the engine chooses.
    """
    environment = Environment(
        overlap=overlap, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=eager_graphs
    )
    options = {**BASELINE, **options}
    if tokens is not None:
        options.setdefault("num_pages", tokens // options["page_size"])
    with LLM(model, environment=environment, **options) as llm:
        yield llm


def pages_for_three(answers: Sequence[RequestOutput], page_size: int) -> int:
    """Pages for STARVED_SEQUENCES sequences of average length, but at least for the longest one."""
    lengths = np.array([len(one.prompt_token_ids) + len(one.token_ids) for one in answers])
    pages = -(-lengths // page_size) + 1
    return int(max(pages.max(), STARVED_SEQUENCES * pages.mean()))


def expect_short_answers(llm: LLM) -> None:
    """Teaches the engine that answers are short, so that it admits too many and must preempt some."""
    llm.generate([[5]] * HISTORY, temperature=0.0, max_tokens=1)


@dataclass(frozen=True)
class Answers:
    """What an engine said, and how it got there."""

    outputs: list[RequestOutput]
    preemptions: int
    pages_leased: int  # after the last answer

    @property
    def texts(self) -> list[str]:
        return [output.text for output in self.outputs]


class Gauge:
    """The questions of this run and the baseline's answers to them."""

    def __init__(self, asked: list[Question], starved: list[Question], tokens: int | None = POOL_TOKENS) -> None:
        """`asked` is for most cells, `starved` for those with few pages; `tokens` as for `engine`."""
        self._tokens = tokens
        self.questions = asked
        self.starved_questions = starved
        everything = list({id(question): question for question in (*asked, *starved)}.values())
        outputs = self._ask(everything).outputs
        self._answers = {id(question): output for question, output in zip(everything, outputs, strict=True)}

    def baseline(self, asked: Sequence[Question]) -> list[RequestOutput]:
        """The baseline's answers to some of the questions."""
        return [self._answers[id(question)] for question in asked]

    def run(self, cell: Cell) -> Answers:
        """All questions, or the starved ones, asked at once."""
        options = dict(cell.options)
        asked = self.questions
        if cell.starved:
            asked = self.starved_questions
            page_size = options.get("page_size", BASELINE["page_size"])
            options["num_pages"] = pages_for_three(self.baseline(asked), page_size)
        return self._ask(asked, overlap=cell.overlap, eager_graphs=cell.eager_graphs, **options)

    def _ask(self, asked: Sequence[Question], **options: Any) -> Answers:
        with engine(tokens=self._tokens, **options) as llm:
            if "num_pages" in options:
                expect_short_answers(llm)
            outputs = llm.chat([question.messages for question in asked], GREEDY)
            return Answers(outputs, llm.stats.total_preempted, llm.stats.pages_leased)


@dataclass
class Heard:
    """Everything that one sequence's client has heard."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.RUNNING


def drive(
    core: EngineCore, requests: Sequence[Request], before_step: Callable[[int], None] = lambda step: None
) -> dict[int, Heard]:
    """Submits all requests, steps until nothing is left to do, and returns what was heard, by uid."""
    heard = {uid: Heard() for one in requests for uid in range(one.uid, one.uid + one.params.n)}
    for request in requests:
        core.submit(request)
    assert core.take_rejected() == []
    step, busy = 0, True
    while busy:
        before_step(step)
        busy = core.step()
        step += 1
        outputs = core.drain_outputs()
        if outputs is None:
            continue
        records = zip(outputs.uids.tolist(), outputs.token_ids.tolist(), outputs.reasons.tolist(), strict=True)
        for uid, token, reason in records:
            assert not heard[uid].reason, "a record after the last one"
            if token >= 0:
                heard[uid].token_ids.append(token)
            heard[uid].reason = FinishReason(reason)
    return heard


def request_of(uid: int, prompt: Sequence[int], params: SamplingParams) -> Request:
    return Request(uid=uid, token_ids=np.array(prompt, dtype="<i4").tobytes(), params=params)
