"""Which tokens a grammar allows next: compiles with xgrammar beside the step loop, follows each sequence by uid.

A step's masks are made once the step before is committed, while the device computes the logits that they will mask. So
they always rest on committed tokens and nothing is ever rolled back.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.request import FinishReason, Grammar, Request
from minisgl_backend.step import StepPlan, StepResult

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]

MAX_COMPILING = 256  # requests whose grammar waits for the compiler
MAX_NESTING = 64  # levels of a JSON schema; the compiler recurses
CACHE_BYTES = 256 << 20
_ANY_JSON = '{"type": ["object", "array"]}'
MIN_SHARED = 4  # masks that are worth several threads
MAX_THREADS = 8


@dataclass(frozen=True)
class CompiledRequest:
    """A request that may be scheduled now, or the error that its sender must see."""

    request: Request
    error: MinisglError | None


class Grammars:
    """The grammars of all sequences of one engine. Used by the step loop only; compiling has its own thread."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        """`load_tokenizer` returns the model's transformers tokenizer, and is called for the first grammar only."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiler: Any = None
        self._todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, Any, MinisglError | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._compiling: dict[int, int] = {}  # uid -> n, of requests
        self._matchers: dict[int, Any] = {}  # by uid of the sequence
        self._rows: dict[int, int] = {}  # row -> uid, of sequences with a grammar
        self._batch: Any = None  # fills masks on several threads
        self._bits: Int32Array = np.empty((0, 0), dtype=np.int32)

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def num_ready(self) -> int:
        """Requests that `take_compiled` would return, those that were cancelled meanwhile included."""
        return self._done.qsize()

    def submit(self, request: Request) -> None:
        """Compiles the request's grammar; it comes back from `take_compiled`.

        Raises InvalidRequestError where a grammar cannot be served at all, CapacityError where too many wait.
        """
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequestError(
                "guided_decoding_guide: this server cannot constrain outputs, since the package xgrammar is missing "
                "(pip install 'xgrammar>=0.1.27')"
            )
        if request.params.min_tokens > 0:
            raise InvalidRequestError(
                f"min_tokens is {request.params.min_tokens}; allowed: 0 with guided decoding, where the grammar "
                "alone says when an answer may end"
            )
        # Those that were cancelled count until the thread has passed over them.
        if max(len(self._compiling), self._todo.qsize()) >= MAX_COMPILING:
            raise CapacityError(f"{MAX_COMPILING} requests wait for their grammars to be compiled; try again later")
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_all, name="grammar-compiler", daemon=True)
            self._thread.start()
        self._compiling[request.uid] = request.params.n
        self._todo.put(request)

    def take_compiled(self) -> list[CompiledRequest]:
        """Requests whose grammar is ready or wrong, since the last call."""
        ready: list[CompiledRequest] = []
        while self._compiling:
            try:
                request, compiled, error = self._done.get_nowait()
            except queue.Empty:
                break
            if request.uid not in self._compiling:
                continue  # cancelled meanwhile
            del self._compiling[request.uid]
            if error is None:
                import xgrammar

                for uid in range(request.uid, request.uid + request.params.n):
                    self._matchers[uid] = xgrammar.GrammarMatcher(compiled)
            ready.append(CompiledRequest(request, error))
        return ready

    def cancel(self, uid: int) -> int:
        """Forgets a request that is still being compiled; returns how many sequences it had, 0 where there is none."""
        return self._compiling.pop(uid, 0)

    def drop(self, uid: int) -> None:
        """The sequence has ended."""
        self._matchers.pop(uid, None)

    def begin(self, plan: StepPlan) -> None:
        """Notes which sequences take rows with this plan; plans come in order."""
        for admitted in plan.admitted:  # also while nobody has a grammar: a row must not keep what it had before
            self._rows.pop(admitted.row, None)
            if admitted.uid in self._matchers:
                self._rows[admitted.row] = admitted.uid

    def masks(self, plan: StepPlan) -> tuple[Int32Array, Int32Array] | None:
        """(result indices [k], bits [k, ceil(vocab / 32)]) of the plan's rows that have a grammar; None: no row has.

        Call it when all earlier steps are committed. Bit `t % 32` of word `t // 32` is 1 where token t is allowed; a
        row without any is one that must fail. A sequence whose answer is complete is not masked: its token is dropped.
        The bits are overwritten by the next call.
        """
        matched = [(index, uid) for index, uid in self._matched(plan) if not self._matchers[uid].is_terminated()]
        if not matched:
            return None
        if len(self._bits) < len(matched):
            self._bits = np.empty((2 * len(matched), -(-self._vocab_size // 32)), dtype=np.int32)
        bits = self._bits[: len(matched)]
        bits.fill(-1)
        try:
            self._fill([self._matchers[uid] for _, uid in matched], bits)
        except Exception:  # whatever the library raises ends one sequence, not the step
            for k, (_, uid) in enumerate(matched):
                try:
                    self._matchers[uid].fill_next_token_bitmask(bits, k)
                except Exception:
                    log.exception("the grammar of sequence %d failed", uid)
                    bits[k] = 0
        return np.array([index for index, _ in matched], dtype=np.int32), bits

    def _fill(self, matchers: list[Any], bits: Int32Array) -> None:
        """One line of bits for each matcher; on several threads where there are enough to share."""
        if len(matchers) < MIN_SHARED:
            for k, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(bits, k)
            return
        if self._batch is None:
            import xgrammar

            cpus = len(os.sched_getaffinity(0))
            self._batch = xgrammar.BatchGrammarMatcher(max_threads=max(1, min(MAX_THREADS, cpus // 2)))
        self._batch.batch_fill_next_token_bitmask(matchers, bits, list(range(len(matchers))))

    def advance(self, plan: StepPlan, result: StepResult) -> list[tuple[int, FinishReason]]:
        """Follows the sampled tokens; returns sequences that must end although they may go on, and why: their answer
        is complete, or what their grammar said cannot be followed."""
        ended: list[tuple[int, FinishReason]] = []
        if not self._matchers:
            return ended
        for index, uid in self._matched(plan):
            matcher = self._matchers[uid]
            try:
                accepted = not matcher.is_terminated() and matcher.accept_token(int(result.token_ids[index]))
                if not accepted or matcher.is_terminated():
                    ended.append((uid, FinishReason.STOP))
            except Exception:  # whatever the library raises ends one sequence, not the step
                log.exception("the grammar of sequence %d failed", uid)
                ended.append((uid, FinishReason.ERROR))
        return ended

    def _matched(self, plan: StepPlan) -> list[tuple[int, int]]:
        """(result index, uid) of the sampled rows with a live matcher."""
        return [
            (index, uid)
            for index, row in enumerate(plan.sampled_rows.tolist())
            if (uid := self._rows.get(row)) is not None and uid in self._matchers
        ]

    def close(self) -> None:
        self._todo.put(None)

    def _compile_all(self) -> None:
        while (request := self._todo.get()) is not None:
            if request.uid not in self._compiling:
                continue  # cancelled before its turn
            compiled, error = None, None
            try:
                compiled = self._compile(request.params.grammar or Grammar(kind="json"))
                self._try(compiled)
            except MinisglError as refused:
                error = refused
            except Exception as failure:
                error = InvalidRequestError(f"guided_decoding_guide cannot be compiled: {_reason(failure)}")
            self._done.put((request, compiled, error))

    def _compile(self, grammar: Grammar) -> Any:
        if self._compiler is None:
            import xgrammar

            info = xgrammar.TokenizerInfo.from_huggingface(
                self._load_tokenizer(), vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids or None
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        # Free whitespace would let a model indent until its tokens run out: JSON is written as json.dumps writes it.
        if grammar.kind == "json":
            return self._compiler.compile_json_schema(_ANY_JSON, any_whitespace=False)
        if grammar.kind == "json_schema":
            _check_schema(grammar.text)
            return self._compiler.compile_json_schema(grammar.text, any_whitespace=False)
        if grammar.kind == "regex":
            return self._compiler.compile_regex(grammar.text)
        return self._compiler.compile_grammar(grammar.text)

    def _try(self, compiled: Any) -> None:
        """Raises InvalidRequestError for a grammar that allows no first token; also fills the compiler's caches."""
        import xgrammar

        bits = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        restricted = xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits, 0)
        if restricted and not bits.any():
            raise InvalidRequestError("guided_decoding_guide accepts no text that this model could write")


def _reason(failure: Exception) -> str:
    """The compiler's own words, without the place in its sources."""
    first_line = next(iter(str(failure).strip().splitlines()), "")
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", first_line)[:500] or type(failure).__name__


def _check_schema(text: str) -> None:
    """Raises InvalidRequestError for what is no JSON or nested too deeply."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"guided_decoding_guide is no JSON schema: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            f"guided_decoding_guide is {json.dumps(schema)[:40]}; allowed: a JSON schema (an object)"
        )
    level, layer = 0, [schema]
    while layer:
        level += 1
        if level > MAX_NESTING:
            raise InvalidRequestError(
                f"guided_decoding_guide is nested more than {MAX_NESTING} levels; allowed: at most {MAX_NESTING}"
            )
        layer = [
            child
            for node in layer
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
