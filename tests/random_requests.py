"""Random requests to the demo model, and an engine core that is asked them: for tests that compare two ways to run.

Every option that changes an answer is drawn, alone and together with others; each request has a seed, so that its
answer does not depend on how, beside whom or how often it is computed. The same `seed` gives the same requests.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from benchmarks.demo_tasks import KINDS, questions
from minisgl_backend.engine.core import EngineCore
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, Grammar, Request, SamplingParams
from minisgl_backend.step import Logprobs
from minisgl_backend.text.tokenizer import Tokenizer

VOCAB_SIZE = 1024  # of the demo model
FIRST_TEXT_TOKEN = 16  # special tokens are below
LONGEST_PROMPT = 400
MOST_TOKENS = 40
MOST_SEQUENCES = 3  # of one request
RELATIVE_TOLERANCE = 1e-5  # of log-probabilities in 32 bits: sums in another order differ by that around -25

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(kind="regex", text="[a-c]{3,9}"),
    Grammar(kind="regex", text="(yes|no|maybe [0-9]{2})"),
    Grammar(kind="regex", text=r"[A-Z][a-z]{2,6}-[0-9]{3}"),
    Grammar(kind="json_schema", text=json.dumps(_SCHEMA)),
    Grammar(kind="json_schema", text=json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 4})),
    Grammar(kind="ebnf_grammar", text='root ::= "[" item ("," item)* "]"\nitem ::= [0-9] [0-9]?'),
)


@dataclass(frozen=True)
class RandomRequest:
    """One prompt, its options, and whether its client leaves early."""

    token_ids: tuple[int, ...]
    params: SamplingParams  # valid for the demo model; `seed` is set
    leaves_after: int | None = None  # tokens of the first sequence after which the client cancels; None: it stays


@dataclass
class RandomAnswer:
    """What the client of one sequence has heard."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.RUNNING
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    error: str = ""


def random_requests(
    seed: int,
    count: int,
    *,
    longest_prompt: int = LONGEST_PROMPT,
    most_tokens: int = MOST_TOKENS,
    most_sequences: int = MOST_SEQUENCES,
    grammars: bool = True,
    leavers: bool = True,
) -> list[RandomRequest]:
    """`count` requests of at most `longest_prompt` prompt tokens, `most_tokens` new ones and `most_sequences` each.

    `grammars`: some are constrained, which needs xgrammar. `leavers`: some are cancelled by their client.
    """
    rng = np.random.default_rng(seed)
    texts = _chat_prompts()
    shared = _cut(texts[int(rng.integers(len(texts)))], longest_prompt // 2)  # a prefix that several prompts have
    requests = []
    for _ in range(count):
        prompt = _prompt(rng, texts, shared, longest_prompt)
        params = _params(rng, prompt, most_tokens, most_sequences, grammars)
        leaves = leavers and rng.random() < 0.15
        leaves_after = int(rng.integers(1, most_tokens)) if leaves else None
        requests.append(RandomRequest(tuple(prompt), params, leaves_after))
    return requests


def ask_core(
    core: EngineCore,
    requests: Sequence[RandomRequest],
    before_step: Callable[[int], None] = lambda step: None,
    *,
    together: bool = False,
) -> list[list[RandomAnswer]]:
    """Submits all requests at once and steps until nothing is left to do: for each, the answers of its sequences.

    An answer that its client has left may be longer than `leaves_after`, by what was under way then.
    `before_step` is called with the number of each turn of the loop. `together`: none begins before all grammars are
    compiled, which takes its own time; else requests with one join when theirs is.
    """
    answers: dict[int, RandomAnswer] = {}
    leavers: dict[int, int] = {}  # uid of a first sequence -> tokens after which its client leaves
    first_uids: list[int] = []
    for one in requests:
        uid = len(answers)
        first_uids.append(uid)
        answers.update((uid + index, RandomAnswer()) for index in range(one.params.n))
        if one.leaves_after is not None:
            leavers[uid] = one.leaves_after
        core.submit(Request(uid=uid, token_ids=np.array(one.token_ids, dtype="<i4").tobytes(), params=one.params))
    grammars = core._grammars  # type: ignore[attr-defined]
    while together and grammars.num_ready < grammars.num_compiling:
        time.sleep(0.001)
    turn = 0
    while True:
        before_step(turn)
        busy = core.step()
        turn += 1
        rejected = core.take_rejected()
        assert not rejected, rejected
        _hear(core, answers)
        for uid, one in list(_leaving(first_uids, requests, leavers, answers)):
            del leavers[uid]
            core.abort(range(uid, uid + one.params.n), FinishReason.CANCELLED)
        if not busy:
            if not core.waits_for_thread:
                break
            time.sleep(0.001)  # its process is a nice one: it hardly runs beside others that never rest
    sizes = [one.params.n for one in requests]
    return [[answers[uid + index] for index in range(n)] for uid, n in zip(first_uids, sizes, strict=True)]


def alone(request: RandomRequest) -> RandomRequest:
    """The same request whose client stays."""
    return dataclasses.replace(request, leaves_after=None)


def assert_same(
    requests: Sequence[RandomRequest],
    expected: Sequence[Sequence[RandomAnswer]],
    found: Sequence[Sequence[RandomAnswer]],
    tolerance: float = 2e-3,
) -> None:
    """Equal tokens, reasons and log-probabilities, these within `tolerance` (nats) or RELATIVE_TOLERANCE.

    Of requests whose client leaves, and may leave earlier or later on the other side, what both have heard is equal.
    """
    for number, (request, ours, theirs) in enumerate(zip(requests, expected, found, strict=True)):
        assert len(ours) == len(theirs) == request.params.n
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            what = f"request {number}, sequence {index}: {request}\n{one}\n{other}"
            both = min(len(one.token_ids), len(other.token_ids))
            assert one.token_ids[:both] == other.token_ids[:both], what
            if request.leaves_after is None:
                assert len(one.token_ids) == len(other.token_ids), what
                assert (one.reason, one.error) == (other.reason, other.error), what
            assert one.reason is not FinishReason.ERROR, what
            if request.params.logprobs is not None:
                assert len(one.logprobs) == len(one.token_ids), what
                assert len(other.logprobs) == len(other.token_ids), what
            for a, b in zip(one.logprobs, other.logprobs, strict=False):
                _assert_close(a, b, tolerance, what)
            if one.prompt_logprobs and other.prompt_logprobs:
                for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
                    _assert_close(a, b, tolerance, what)
            elif request.leaves_after is None:
                assert bool(one.prompt_logprobs) == bool(other.prompt_logprobs), what


def _assert_close(one: Logprobs, other: Logprobs, tolerance: float, what: str) -> None:
    assert one.token_id == other.token_id, what
    assert _is_close(one.logprob, other.logprob, tolerance), what
    assert len(one.top_ids) == len(other.top_ids), what
    assert all(_is_close(a, b, tolerance) for a, b in zip(one.top, other.top, strict=True)), what


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=tolerance)


def _hear(core: EngineCore, answers: dict[int, RandomAnswer]) -> None:
    outputs = core.drain_outputs()
    if outputs is None:
        return
    records = zip(outputs.uids.tolist(), outputs.token_ids.tolist(), outputs.reasons.tolist(), strict=True)
    for index, (uid, token, reason) in enumerate(records):
        answer = answers[uid]
        assert not answer.reason, "a record after the last one"
        if token >= 0:
            answer.token_ids.append(token)
        answer.reason = FinishReason(reason)
        detail = outputs.details.get(index)
        if detail is not None:
            answer.logprobs += [] if detail.logprobs is None else [detail.logprobs]
            answer.prompt_logprobs += detail.prompt_logprobs
            answer.error = detail.error or answer.error


def _leaving(
    first_uids: Sequence[int],
    requests: Sequence[RandomRequest],
    leavers: dict[int, int],
    answers: dict[int, RandomAnswer],
) -> Iterator[tuple[int, RandomRequest]]:
    for uid, one in zip(first_uids, requests, strict=True):
        most = leavers.get(uid)
        if most is not None and not answers[uid].reason and len(answers[uid].token_ids) >= most:
            yield uid, one


@cache
def _chat_prompts() -> list[list[int]]:
    """Questions of every kind that the demo model was trained for, as its chat template writes them."""
    tokenizer = Tokenizer(find_model_dir("demo"))
    asked = [question for kind in KINDS for question in questions(kind, 8, seed=3)]
    return [tokenizer.encode(tokenizer.render(one.messages), add_special_tokens=False) for one in asked]


def _cut(tokens: Sequence[int], most: int) -> list[int]:
    return list(tokens[-most:])


def _prompt(rng: np.random.Generator, texts: list[list[int]], shared: list[int], longest: int) -> list[int]:
    kind = rng.random()
    if kind < 0.55:
        return _cut(texts[int(rng.integers(len(texts)))], longest)
    length = int(rng.integers(1, max(2, longest // 2)))
    noise: list[int] = rng.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE, length).tolist()
    if kind < 0.8:
        return [*shared, *noise[: min(len(noise), 20)]]
    return noise


def _params(
    rng: np.random.Generator, prompt: list[int], most_tokens: int, most_sequences: int, grammars: bool
) -> SamplingParams:
    def sometimes(share: float) -> bool:
        return bool(rng.random() < share)

    values: dict[str, Any] = {
        "seed": int(rng.integers(2**63)),
        "max_tokens": int(rng.integers(1, most_tokens + 1)),
        "temperature": 0.0 if sometimes(0.35) else float(np.float32(rng.uniform(0.2, 1.6))),
        "ignore_eos": sometimes(0.3),
    }
    if sometimes(0.25):
        values["top_k"] = int(rng.choice([1, 2, 5, 40, VOCAB_SIZE]))
    if sometimes(0.25):
        values["top_p"] = float(rng.choice([0.1, 0.5, 0.9, 1.0]))
    if sometimes(0.15):
        values["min_p"] = float(rng.choice([0.02, 0.2, 1.0]))
    if sometimes(0.2):
        values["repetition_penalty"] = float(rng.choice([0.8, 1.1, 1.5]))
    if sometimes(0.15):
        values["presence_penalty"] = float(rng.choice([-1.0, 0.5, 2.0]))
    if sometimes(0.15):
        values["frequency_penalty"] = float(rng.choice([-0.5, 0.3, 1.5]))
    if sometimes(0.2):
        tokens = rng.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE, int(rng.integers(1, 6))).tolist()
        values["logit_bias"] = {token: float(rng.choice([-100.0, -3.0, 2.0, 6.0])) for token in tokens}
    if sometimes(0.2):
        starts = rng.integers(0, len(prompt), int(rng.integers(1, 4))).tolist()
        words = [tuple(prompt[start : start + int(rng.integers(1, 4))]) for start in starts]
        values["bad_words_token_ids"] = tuple(dict.fromkeys(words))
    if sometimes(0.2):
        values["stop_token_ids"] = tuple(rng.integers(FIRST_TEXT_TOKEN, VOCAB_SIZE, int(rng.integers(1, 30))).tolist())
    if sometimes(0.2):
        values["stop"] = (str(rng.choice(["1", "4", "e", " a", ", "])),)  # for callers that look for them
    if sometimes(0.25):
        values["logprobs"] = int(rng.choice([0, 1, 5, 20]))
    if sometimes(0.15):
        values["prompt_logprobs"] = int(rng.choice([0, 1, 5]))
    if sometimes(0.2):
        values["n"] = int(rng.integers(1, most_sequences + 1))
    if grammars and sometimes(0.25):
        values["grammar"] = GRAMMARS[int(rng.integers(len(GRAMMARS)))]
    elif sometimes(0.2):
        values["min_tokens"] = int(rng.integers(1, values["max_tokens"] + 1))
    if values["seed"] % 6 == 0:
        values["cache_salt"] = "tenant"
    if values["seed"] % 5 == 0:
        values["speculative"] = False
    params = SamplingParams(**values)
    params.validate(VOCAB_SIZE)
    return params
