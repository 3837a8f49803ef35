"""A front's state of its requests: tokens that wait, stop strings, and the parts made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.delivery.delta import Delta, PerfMetrics, Sender, join_deltas
from minisgl_backend.delivery.send_queue import SendQueue
from minisgl_backend.ipc.messages import Outputs
from minisgl_backend.ipc.wire import EngineRequest, Part
from minisgl_backend.request import FinishReason
from minisgl_backend.step import Logprobs, SequenceDetail
from minisgl_backend.text.output_processor import OutputProcessor
from minisgl_backend.text.vocabulary import PROMPT_TAIL, Vocabulary


class Stream:
    """One request: its sender and its sequences.

    Only its methods change it, and each says which thread calls it; any thread may read. The receive thread is the
    engine client's, the sender thread the one that serves `queue`.
    """

    __slots__ = (
        "_first_token_ns",
        "_num_unfinished",
        "_reused_tokens",
        "_started",
        "abandoned",
        "arrival_ns",
        "closed",
        "confirmed",
        "failure",
        "first_scheduled_ns",
        "num_input_tokens",
        "prompt_logprobs",
        "prompt_tail",
        "queue",
        "sender",
        "sequences",
        "spec",
        "wants_details",
    )

    def __init__(
        self,
        sender: Sender,
        spec: EngineRequest,
        uid: int,
        token_ids: Int32Array,
        vocabulary: Vocabulary,
        queue: SendQueue[SequenceStream],
        confirmed: bool,
    ) -> None:
        """`token_ids`: its prompt, int32 [n]. `queue`: of the sender thread that serves it from now on. `confirmed`: a
        detokenizer acknowledges the responses of this stream."""
        self.sender: Final = sender
        self.spec: Final = spec
        self.num_input_tokens: Final = len(token_ids)
        self.prompt_tail: Final = vocabulary.tail(token_ids[-PROMPT_TAIL:].tolist())
        self.queue: Final = queue
        self.arrival_ns = time.time_ns()
        # Written by the receive thread.
        self.prompt_logprobs: tuple[Logprobs, ...] = ()
        self._reused_tokens = 0
        self.first_scheduled_ns = 0  # when its first step was planned
        self._first_token_ns = 0  # when the core had the token
        self.abandoned = False  # its client has left: no one receives what it still has to send
        # Written by the sender thread.
        self._started = False  # its first token was taken
        self.closed = False  # its last response was made
        # Written by any thread.
        self.confirmed = confirmed  # a detokenizer acknowledges its responses
        self.failure: tuple[str, str] | None = None  # the error that ends it: status and message
        self.sequences: Final = tuple(
            SequenceStream(self, uid + index, index, vocabulary) for index in range(spec.params.n)
        )
        self._num_unfinished = len(self.sequences)  # written by the sender thread
        self.wants_details: Final = spec.options.details or len(self.sequences) > 1

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(sequence.uid for sequence in self.sequences)

    @property
    def is_late(self) -> bool:
        """Its deadline has passed."""
        return self.spec.deadline is not None and time.monotonic() >= self.spec.deadline

    @property
    def is_paced(self) -> bool:
        """Its responses take turns and wait for earlier acknowledgements, which also show that its client is there."""
        return self.confirmed and self.spec.options.stream

    @property
    def is_complete(self) -> bool:
        """All its sequences have ended, and their last tokens are taken."""
        return self._num_unfinished == 0

    @property
    def has_sent(self) -> bool:
        return any(sequence.credit.sent for sequence in self.sequences)

    @property
    def was_acknowledged(self) -> bool:
        """At least one of its responses has reached the detokenizer."""
        return any(sequence.credit.acknowledged for sequence in self.sequences)

    def metrics(self, page_size: int, *, final: bool) -> PerfMetrics | None:
        """The metrics so far, if the client requested them. `final`: for the last response."""
        options = self.spec.options
        if not options.perf_metrics and not (final and options.final_perf_metrics):
            return None
        tokens = self.num_input_tokens + sum(sequence.num_tokens for sequence in self.sequences)
        return PerfMetrics(
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self._first_token_ns,
            last_token_ns=time.time_ns(),
            cached_tokens=self._reused_tokens,
            image_tokens=sum(content.length for content in self.spec.contents),
            reused_pages=self._reused_tokens // page_size,
            total_pages=-(-tokens // page_size),
            draft_tokens=sum(sequence._draft_tokens for sequence in self.sequences),
            accepted_draft_tokens=sum(sequence._accepted_draft_tokens for sequence in self.sequences),
        )

    def fail(self, status: str, message: str) -> None:
        """Any thread: the sender thread ends it with this error, before anything else that it has to send."""
        self.failure = (status, message)
        self.sequences[0]._enqueue()

    def stop_confirming(self) -> None:
        """Any thread: its later responses go past the detokenizer."""
        self.confirmed = False

    def abandon(self) -> None:
        """Receive thread: its client has left."""
        self.abandoned = True
        self._enqueue_ended()

    def close(self) -> None:
        """Sender thread: its last response is made."""
        self.closed = True

    def _enqueue_ended(self) -> None:
        """Receive thread: ends that waited to learn whether the detokenizer has any of its responses need not wait."""
        for sequence in self.sequences:
            if sequence.reason:
                sequence._enqueue()

    def _note(self, detail: SequenceDetail) -> None:
        """Receive thread, by `SequenceStream.note`."""
        if detail.prompt_logprobs:
            self.prompt_logprobs = detail.prompt_logprobs
        if detail.cached_tokens is not None:
            self._reused_tokens = detail.cached_tokens
        if detail.first_token and not self._first_token_ns:
            self._first_token_ns = _wall_clock_ns(detail.first_token)
            self.first_scheduled_ns = _wall_clock_ns(detail.first_planned)


class SequenceStream:
    """One sequence of a request: the receive thread appends, the sender thread takes.

    As with `Stream`, only its methods change it. Those that give the sender thread work put it into the queue.
    """

    __slots__ = (
        "_accepted_draft_tokens",
        "_blocked",
        "_cumulative_logprob",
        "_draft_tokens",
        "_index",
        "_last_token",
        "_last_tokens_at",
        "_log_probs",
        "_logprobs",
        "_output",
        "_pending",
        "_queued",
        "_unsent",
        "credit",
        "eager",
        "failure",
        "finished",
        "num_tokens",
        "reason",
        "stream",
        "uid",
    )

    def __init__(self, stream: Stream, uid: int, index: int, vocabulary: Vocabulary) -> None:
        spec = stream.spec
        self.stream: Final = stream
        self.uid: Final = uid
        self._index = index
        # The text is made here if it may end the sequence, otherwise in the detokenizer.
        self._output = OutputProcessor.of(spec.params, vocabulary, stream.prompt_tail) if spec.params.stop else None
        self.eager: Final = spec.options.stream or self._output is not None  # tokens are taken as they come
        # Written by the receive thread, `_reason` after `_last_token`.
        self._pending: list[int] = []
        self._logprobs: list[Logprobs] = []
        self.failure = ("INTERNAL", "the engine failed to compute the answer")
        self._draft_tokens = self._accepted_draft_tokens = 0
        self._last_token = -1  # the one that came with `_reason`; -1: none
        self.reason = 0
        # Written by the sender thread.
        self.finished = False
        self.num_tokens = 0
        self._cumulative_logprob = 0.0
        self._unsent: list[Delta] = []
        self._log_probs: list[float] = []  # sent so far, if the client wants all of them each time
        self._last_tokens_at = 0.0  # time.monotonic()
        # Hand-shakes between the two threads.
        self._queued = False  # it is in the queue, and its turn has not begun
        self._blocked = False  # it waits for an acknowledgement
        self.credit: Final = stream.queue.open(uid)  # its counts of responses

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None if something else did, or it has not ended."""
        return None if self._output is None else self._output.stop_string

    @property
    def num_unacknowledged(self) -> int:
        """Number of responses sent and not acknowledged."""
        credit = self.credit
        return credit.sent - credit.acknowledged

    @property
    def is_urgent(self) -> bool:
        """It has something to send that must not wait."""
        stream = self.stream
        if stream.abandoned:
            return False
        if self.reason or not self.credit.sent or stream.failure is not None:
            return True
        return not stream.is_paced

    def append(self, token_id: int, reason: int = 0) -> None:
        """Receive thread: one record of the engine; token -1 means none."""
        if reason:
            # Never visible without its reason: taken for an ordinary token, a stop token would become text.
            self._last_token = token_id
            self.reason = reason
            self._enqueue()  # an end does not wait for the turn that its tokens wait for
            return
        if token_id >= 0:
            self._pending.append(token_id)
        if self.eager and not self._queued:
            self._enqueue()

    def note(self, detail: SequenceDetail) -> None:
        """Receive thread: the detail of a record; called before `append`."""
        if detail.logprobs is not None:
            self._logprobs.append(detail.logprobs)
        if detail.error:
            self.failure = detail.status, detail.error
        if detail.draft_tokens:
            self._draft_tokens, self._accepted_draft_tokens = detail.draft_tokens, detail.accepted_draft_tokens
        self.stream._note(detail)

    def note_acknowledged(self) -> None:
        """Receive thread: the detokenizer has handled a response of it, which its credit has counted."""
        self.stream.queue.note_acknowledged()
        was_blocked, self._blocked = self._blocked, False
        if was_blocked and not self._queued:
            self._enqueue()
        self.stream._enqueue_ended()

    def _enqueue(self) -> None:
        """Any thread: queues it for the sender thread."""
        self._queued = True
        self.stream.queue.put(self)

    def start_turn(self) -> None:
        """Sender thread, by its queue, before reading its state: what comes after this queues it again."""
        self._queued = False

    def must_wait(self, limit: int) -> bool:
        """Sender thread: whether its next response has to wait because `limit` are unacknowledged; the next
        acknowledgement queues it again. False if it is not paced."""
        if self.num_unacknowledged < limit or not self.stream.is_paced:
            return False
        self._blocked = True
        # An acknowledgement may have come between the two statements above.
        if self.num_unacknowledged < limit:
            self._blocked = False
            return False
        return True

    def gather(self) -> Delta | None:
        """Sender thread: what is new since the last call, kept for the next `take`; None if nothing is.

        Its reason is 0 unless it is the last one.
        """
        reason = self.reason  # before the tokens: if it is set, they are complete
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            reason = 0  # a failure is not a part: the responder answers it with an error
        count = len(self._pending)
        tokens = self._pending[:count]
        del self._pending[:count]
        if reason and self._last_token >= 0:
            tokens.append(self._last_token)
        if not tokens and not reason:
            return None
        text = None
        stop_token = reason == FinishReason.STOP and self._last_token >= 0
        if self._output is not None:
            text, num_tokens, reason = self._output.feed(tokens, reason, ends_with_stop_token=stop_token)
            tokens = tokens[:num_tokens]
        self.num_tokens += len(tokens)
        logprobs = tuple(self._logprobs[: len(tokens)])
        del self._logprobs[: len(logprobs)]
        self._cumulative_logprob += sum(entry.logprob for entry in logprobs)
        if reason:
            self.finished = True
            self.stream._num_unfinished -= 1
        part = Part(
            token_ids=np.asarray(tokens, dtype="<i4").tobytes(),
            text=text,
            is_last=self.finished,
            ends_with_stop_token=stop_token and text is None and not self.stream.spec.params.include_stop_str_in_output,
        )
        delta = Delta(
            part=part,
            num_tokens=len(tokens),
            reason=int(reason),
            index=self._index,
            logprobs=logprobs,
            cumulative_logprob=self._cumulative_logprob,
        )
        self._unsent.append(delta)
        return delta

    def take(self) -> Delta:
        """Sender thread: all that was gathered since the last call, merged, which is about to be sent."""
        deltas, self._unsent = self._unsent, []
        return deltas[0] if len(deltas) == 1 else join_deltas(deltas)

    def add_log_probs(self, logprobs: Sequence[Logprobs]) -> Sequence[float]:
        """Sender thread, once for what `take` returned: the log-probabilities of these tokens and all before."""
        self._log_probs += [entry.logprob for entry in logprobs]
        return self._log_probs

    def time_tokens(self, now: float) -> tuple[float | None, float | None]:
        """Sender thread, with new tokens: seconds since the request came, if these are the first tokens of all its
        sequences, and seconds since this sequence's last tokens, if it had any. `now`: time.monotonic()."""
        stream, last = self.stream, self._last_tokens_at
        self._last_tokens_at = now
        since_arrival = None
        if not stream._started:
            stream._started = True
            since_arrival = (time.time_ns() - stream.arrival_ns) / 1e9
        return since_arrival, now - last if last else None


def append_outputs(sequences: Mapping[int, SequenceStream], outputs: Outputs) -> None:
    """Receive thread: appends the records of a step to their sequences (by uid); those of others are ignored."""
    uids = np.frombuffer(outputs.uids, dtype="<i8").tolist()
    for index, detail in outputs.details.items():
        if (sequence := sequences.get(uids[index])) is not None:
            sequence.note(detail)
    tokens = np.frombuffer(outputs.token_ids, dtype="<i4").tolist()
    for uid, token, reason in zip(uids, tokens, outputs.reasons, strict=True):
        sequence = sequences.get(uid)
        if sequence is None:
            continue
        if reason:
            sequence.append(token, reason)
        else:  # nearly every token: `append`, inlined
            sequence._pending.append(token)
            if not sequence._queued and sequence.eager:
                sequence._enqueue()


def streams_of(sequences: Mapping[int, SequenceStream]) -> list[Stream]:
    """The streams that these sequences (by uid) belong to, each once."""
    return list({id(sequence.stream): sequence.stream for sequence in list(sequences.values())}.values())


def _wall_clock_ns(monotonic: float) -> int:
    """Nanoseconds since the epoch for seconds of time.monotonic(), which is the same in every process of a machine."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
