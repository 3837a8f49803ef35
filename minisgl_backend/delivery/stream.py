"""What a front knows of the requests in its hands: tokens that wait, stop strings, and the parts made of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.credits import Credit
from minisgl_backend.ipc.wire import Chunk, EngineRequest, Part
from minisgl_backend.request import FinishReason
from minisgl_backend.step import Logprobs, SequenceDetail
from minisgl_backend.text.output_processor import OutputProcessor
from minisgl_backend.text.vocabulary import Vocabulary


class Sender(Protocol):
    """Where the responses of one request go. `send` with `final` and `fail` end it; only one of them, once."""

    def send(self, chunk: Chunk, details: Arrays, final: bool) -> None: ...

    def fail(self, status: str, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...


class PerfMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times are nanoseconds since the epoch, as clients of tensorrtllm_backend read them; pages are KV pages."""

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    cached_tokens: int  # prompt tokens that the prefix cache supplied
    reused_pages: int
    total_pages: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one sequence: `part` becomes text, the rest are the facts beside it."""

    part: Part
    num_tokens: int
    reason: int  # FinishReason; 0: the sequence goes on
    index: int  # of the sequence, with n > 1
    logprobs: tuple[Logprobs, ...]
    cumulative_logprob: float  # of the sequence so far


class Stream:
    """One request: its sender and its sequences."""

    __slots__ = (
        "abandoned",
        "arrival_ns",
        "closed",
        "confirmed",
        "failure",
        "first_scheduled_ns",
        "first_token_ns",
        "num_input_tokens",
        "num_unfinished",
        "prompt_logprobs",
        "prompt_tail",
        "reused_tokens",
        "sender",
        "sequences",
        "spec",
        "started",
        "wants_details",
        "worker",
    )

    def __init__(
        self,
        sender: Sender,
        spec: EngineRequest,
        uid: int,
        num_input_tokens: int,
        vocabulary: Vocabulary,
        *,
        confirmed: bool,
        prompt_tail: tuple[int, ...] = (),
    ) -> None:
        """`confirmed`: a detokenizer confirms what it has handled of this stream. `prompt_tail`: Vocabulary.tail."""
        self.sender = sender
        self.spec = spec
        self.num_input_tokens = num_input_tokens
        self.prompt_tail = prompt_tail
        self.confirmed = confirmed
        self.sequences = [SequenceStream(self, uid + index, index, vocabulary) for index in range(spec.params.n)]
        self.num_unfinished = len(self.sequences)
        self.wants_details = spec.options.details or len(self.sequences) > 1
        self.prompt_logprobs: tuple[Logprobs, ...] = ()
        self.reused_tokens = 0
        self.arrival_ns = time.time_ns()
        self.first_scheduled_ns = 0  # when the first step with a token of it was planned
        self.first_token_ns = 0  # when the core had it
        self.started = False  # the first token was taken over by a responder thread
        self.failure: tuple[str, str] | None = None  # status and message
        self.abandoned = False  # its client has left: nobody waits for what it still has to send
        self.closed = False
        self.worker = 0  # the responder thread that owns the sender

    @property
    def is_late(self) -> bool:
        """Its deadline has passed."""
        return self.spec.deadline is not None and time.monotonic() >= self.spec.deadline

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(sequence.uid for sequence in self.sequences)

    def metrics(self, page_size: int, *, final: bool) -> PerfMetrics | None:
        """Figures so far, where the client asked for them. `final`: for the last response."""
        options = self.spec.options
        if not options.perf_metrics and not (final and options.final_perf_metrics):
            return None
        tokens = self.num_input_tokens + sum(sequence.num_tokens for sequence in self.sequences)
        return PerfMetrics(
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=time.time_ns(),
            cached_tokens=self.reused_tokens,
            reused_pages=self.reused_tokens // page_size,
            total_pages=-(-tokens // page_size),
        )


class SequenceStream:
    """One sequence of a request. The receive thread appends, the responder thread takes."""

    __slots__ = (
        "blocked",
        "credit",
        "cumulative_logprob",
        "deltas",
        "eager",
        "error",
        "finished",
        "index",
        "last_sent",
        "log_probs",
        "logprobs",
        "num_tokens",
        "output",
        "pending",
        "queued",
        "reason",
        "stop_token",
        "stream",
        "uid",
    )

    def __init__(self, stream: Stream, uid: int, index: int, vocabulary: Vocabulary) -> None:
        self.stream = stream
        self.uid = uid
        self.index = index
        # Written by the receive thread, `reason` last.
        self.pending: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.error = ""
        self.stop_token = False  # the last token is the one that ended the sequence
        self.reason = 0
        # Written by the responder thread.
        spec = stream.spec
        # The text is made here where it may end the sequence, else in the detokenizer.
        self.output = _new_output(stream, vocabulary) if spec.params.stop else None
        self.eager = spec.options.stream or self.output is not None  # tokens are wanted as they come
        self.credit: Credit  # its counts of responses; set when the responder adopts the stream
        self.queued = False  # this one and the next are written by its SendQueue
        self.blocked = False
        self.finished = False
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.deltas: list[Delta] = []  # taken, not sent
        self.log_probs: list[float] = []  # sent so far, where the client wants all of them each time
        self.last_sent = 0.0

    @property
    def is_urgent(self) -> bool:
        """What it has to send waits for nothing."""
        stream = self.stream
        if stream.abandoned:
            return False
        if self.reason or not self.credit.sent or stream.failure is not None:
            return True
        return not (stream.confirmed and stream.spec.options.stream)

    def append(self, token_id: int, reason: int) -> None:
        """One record of the engine; token -1 says that there is none."""
        if token_id >= 0:
            self.pending.append(token_id)
        if reason:
            self.stop_token = token_id >= 0 and reason == FinishReason.STOP
            self.reason = reason

    def note(self, detail: SequenceDetail) -> None:
        """What comes with a record; called before `append`."""
        if detail.logprobs is not None:
            self.logprobs.append(detail.logprobs)
        if detail.prompt_logprobs:
            self.stream.prompt_logprobs = detail.prompt_logprobs
        if detail.cached_tokens is not None:
            self.stream.reused_tokens = detail.cached_tokens
        if detail.first_token and not self.stream.first_token_ns:
            self.stream.first_token_ns = _wall_clock_ns(detail.first_token)
            self.stream.first_scheduled_ns = _wall_clock_ns(detail.first_planned)
        if detail.error:
            self.error = detail.error

    def take(self) -> Delta | None:
        """What is new since the last call; None where that is nothing. Its reason is 0 unless it is the last."""
        reason = self.reason  # before the tokens: if it is set, they are complete
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            reason = 0  # a failure is no part: the responder answers it with an error
        count = len(self.pending)
        tokens = self.pending[:count]
        del self.pending[:count]
        if not tokens and not reason:
            return None
        text = None
        stop_token = bool(reason) and self.stop_token
        if self.output is not None:
            text, num_tokens, reason = self.output.feed(tokens, reason, ends_with_stop_token=stop_token)
            tokens = tokens[:num_tokens]
        self.num_tokens += len(tokens)
        self.finished = bool(reason)
        logprobs = tuple(self.logprobs[: len(tokens)])
        del self.logprobs[: len(logprobs)]
        self.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        part = Part(
            token_ids=np.asarray(tokens, dtype="<i4").tobytes(),
            text=text,
            is_last=self.finished,
            ends_with_stop_token=stop_token and text is None and not self.stream.spec.options.include_stop_string,
        )
        return Delta(
            part=part,
            num_tokens=len(tokens),
            reason=int(reason),
            index=self.index,
            logprobs=logprobs,
            cumulative_logprob=self.cumulative_logprob,
        )


def _wall_clock_ns(monotonic: float) -> int:
    """Nanoseconds since the epoch for seconds of time.monotonic(), which is the same in every process of a machine."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def _new_output(stream: Stream, vocabulary: Vocabulary) -> OutputProcessor:
    params, options = stream.spec.params, stream.spec.options
    return OutputProcessor(
        vocabulary,
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop=options.include_stop_string,
        skip_special_tokens=options.skip_special_tokens,
        prompt_tail=stream.prompt_tail,
    )


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Those of one sequence, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    texts = [delta.part.text for delta in deltas if delta.part.text is not None]
    part = Part(
        token_ids=b"".join(delta.part.token_ids for delta in deltas),
        text="".join(texts) if texts else None,
        is_last=last.part.is_last,
        ends_with_stop_token=last.part.ends_with_stop_token,
    )
    return Delta(
        part=part,
        num_tokens=sum(delta.num_tokens for delta in deltas),
        reason=last.reason,
        index=last.index,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        cumulative_logprob=last.cumulative_logprob,
    )
