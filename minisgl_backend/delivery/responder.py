"""Sends what the engine computed: sender threads that own every response sender until its last response.

* A stream belongs to one thread for ever: that keeps its order.
* While a stream keeps up, every token is a response of its own, the first one at once. A stream with too many
  unconfirmed responses waits, and its tokens gather into one larger response.
* The last data of a request carries the final flag; cancelled and failed requests end with one error that carries it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.latency import LatencyRecorder
from minisgl_backend.delivery.output_fields import OutputFieldEncoder
from minisgl_backend.delivery.send_queue import SendQueue
from minisgl_backend.delivery.stream import Delta, SequenceStream, Stream, join_deltas
from minisgl_backend.ipc.wire import Chunk, TextOptions
from minisgl_backend.request import FinishReason

MAX_UNCONFIRMED = 128  # responses between front and detokenizer, over all streams; each may have one

NO_TEXT = (
    "the requested outputs lack text_output (output_ids of tensorrt_llm); allowed with stream=true: it and others, "
    "or none by name"
)
LATE = "the request was cancelled: its timeout has passed"

_LOGGER = logging.getLogger(__name__)


class Responder:
    """Sender threads and the queues before them.

    `credits` counts what was sent; `abort(uids, reason)` tells the engine to stop; `on_closed(stream)` is called once
    for each stream, on its thread, when its last response is out.
    """

    def __init__(
        self,
        *,
        credits: StreamCredits,
        abort: Callable[[Iterable[int], FinishReason], None],
        on_closed: Callable[[Stream], None],
        latency: LatencyRecorder,
        details: OutputFieldEncoder,
        num_workers: int = 2,
    ) -> None:
        self._credits = credits
        self._abort = abort
        self._on_closed = on_closed
        self._latency = latency
        self._details = details
        self.page_size = 1  # for perf metrics; known once the engine is up
        self._num_streams = 0
        self._count_lock = threading.Lock()
        self._queues = [SendQueue(credits, worker) for worker in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"responder-{worker}", daemon=True)
            for worker in range(num_workers)
        ]
        # Held by a worker while it numbers and sends a response that will be confirmed.
        self.sending = [threading.Lock() for _ in range(num_workers)]
        self.last_sent = 0.0  # time.monotonic() of the last one
        for thread in self._threads:
            thread.start()

    @property
    def num_workers(self) -> int:
        return len(self._threads)

    def adopt(self, stream: Stream) -> None:
        """Takes over a new stream. Called before its request reaches the engine."""
        stream.worker = stream.sequences[0].uid % len(self._threads)
        for sequence in stream.sequences:
            sequence.credit = self._credits.open(sequence.uid, stream.worker)
        self._count(1)

    def wake(self, sequence: SequenceStream) -> None:
        """The sequence has something new."""
        if not sequence.queued or sequence.reason:  # an end does not wait for the turn that was taken for its tokens
            self._queues[sequence.stream.worker].put(sequence)

    def fail(self, stream: Stream, status: str, message: str) -> None:
        """Ends the stream with an error."""
        stream.failure = (status, message)
        self._queues[stream.worker].put(stream.sequences[0])

    def note_acknowledged(self, sequence: SequenceStream) -> None:
        """The detokenizer has handled a chunk of the sequence."""
        queue = self._queues[sequence.stream.worker]
        queue.note_acknowledged()
        if queue.unblock(sequence) or sequence.reason:
            self.wake(sequence)

    def lose(self, stream: Stream) -> None:
        """The server has dropped a chunk of the stream: its client has left, and nobody reads what comes; or, where
        it dropped them all, the client named its outputs, and an ensemble leaves out a model that nobody asked for."""
        if not any(sequence.credit.acknowledged for sequence in stream.sequences):
            stream.confirmed = False
            self.fail(stream, "INVALID_ARG", NO_TEXT)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads; what is queued before is still sent."""
        for queue in self._queues:
            queue.close()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self, worker: int) -> None:
        queue = self._queues[worker]
        while (sequence := queue.next()) is not None:
            try:
                self._serve(sequence)
            except Exception as error:  # one stream's failure must not end the others'
                _LOGGER.exception("request %r (stream %d) failed", sequence.stream.spec.request_id, sequence.uid)
                self._end_failed(sequence.stream, f"the answer could not be sent: {error}")

    def _end_failed(self, stream: Stream, message: str) -> None:
        """Ends a stream whose response could not be sent. Where that was its last one, or its error cannot go behind
        its chunks either, an error is sent alone: small as it is, it may get through."""
        try:
            if not stream.closed:
                self._end_with_error(stream, "INTERNAL", message)
                return
        except Exception as error:
            _LOGGER.error("request %r: its error could not be sent: %s", stream.spec.request_id, error)
        try:
            stream.sender.fail("INTERNAL", message)
        except Exception as error:
            _LOGGER.error("request %r cannot be answered: %s", stream.spec.request_id, error)

    def _serve(self, sequence: SequenceStream) -> None:
        stream = sequence.stream
        if stream.closed:
            return
        reason = sequence.reason
        if stream.failure is not None:
            self._end_with_error(stream, *stream.failure)
        elif reason == FinishReason.CANCELLED:
            self._end_cancelled(sequence)
        elif reason == FinishReason.ERROR:
            self._end_with_error(stream, "INTERNAL", sequence.error or "the engine failed to compute the answer")
        elif stream.abandoned and not reason:
            return  # its end is on its way
        elif not sequence.finished and (reason or sequence.eager) and not self._must_wait(sequence, reason):
            self._advance(sequence)

    def _end_cancelled(self, sequence: SequenceStream) -> None:
        stream = sequence.stream
        sent = any(one.credit.sent for one in stream.sequences)
        acknowledged = any(one.credit.acknowledged for one in stream.sequences)
        if stream.confirmed and not stream.abandoned and sent and not acknowledged:
            # Whether any of it reaches the detokenizer is known soon, by `note_acknowledged` or `lose`: an error behind
            # chunks that are dropped would be dropped too.
            return
        self._end_with_error(stream, "CANCELLED", LATE if stream.is_late else "the request was cancelled")

    def _must_wait(self, sequence: SequenceStream, reason: int) -> bool:
        stream = sequence.stream
        if reason or not stream.confirmed or not stream.spec.options.stream:
            return False
        if not self._is_at_limit(sequence):
            return False
        queue = self._queues[stream.worker]
        queue.block(sequence)
        # An acknowledgement may have come between the two lines above.
        if not self._is_at_limit(sequence):
            queue.unblock(sequence)
            return False
        return True

    def _is_at_limit(self, sequence: SequenceStream) -> bool:
        limit = max(1, MAX_UNCONFIRMED // max(1, self._num_streams))
        return sequence.credit.sent - sequence.credit.acknowledged >= limit

    def _advance(self, sequence: SequenceStream) -> None:
        delta = sequence.take()
        if delta is None:
            return
        stream = sequence.stream
        if delta.num_tokens:
            self._latency.on_tokens(sequence, delta.num_tokens)
        sequence.deltas.append(delta)
        if sequence.finished:
            stream.num_unfinished -= 1
            if not sequence.reason:  # a stop string, which the engine cannot see
                self._abort((sequence.uid,), FinishReason.STOP)
        if stream.spec.options.stream:
            if sequence.finished or delta.part.text != "":
                self._send_delta(sequence)
        elif stream.spec.options.apart:
            if sequence.finished:
                self._send_delta(sequence)
        elif stream.num_unfinished == 0:
            self._send_whole(stream)

    def _send_delta(self, sequence: SequenceStream) -> None:
        stream = sequence.stream
        final = stream.num_unfinished == 0
        delta = join_deltas(sequence.deltas)
        sequence.deltas = []
        first = sequence.credit.sent == 0
        details = self._encode_details(stream, (delta,), first=first, final=final)
        options = _text_options(stream) if first else None
        chunk = partial(
            Chunk, uid=sequence.uid, parts=(delta.part,), options=options, token_ids=stream.spec.options.token_ids
        )
        if final or not stream.confirmed:
            self._send(stream, chunk(number=self._credits.number(sequence.credit)), details, final)
            return
        with self.sending[stream.worker]:
            now = self.last_sent = time.monotonic()
            number = self._credits.send(sequence.credit, now)
            ask = self._queues[stream.worker].asks_for_ack() or first or self._is_at_limit(sequence)
            stream.sender.send(chunk(number=number, confirm=ask), details, False)

    def _send_whole(self, stream: Stream) -> None:
        deltas = [join_deltas(sequence.deltas) for sequence in stream.sequences]
        chunk = Chunk(
            uid=stream.sequences[0].uid,
            number=self._credits.number(stream.sequences[0].credit),
            parts=tuple(delta.part for delta in deltas),
            options=_text_options(stream),
        )
        self._send(stream, chunk, self._encode_details(stream, deltas, first=True, final=True), True)

    def _encode_details(self, stream: Stream, deltas: Sequence[Delta], *, first: bool, final: bool) -> Arrays:
        if not stream.wants_details:
            return {}
        metrics = stream.metrics(self.page_size, final=final)
        return self._details.encode(stream, deltas, first=first, metrics=metrics)

    def _send(self, stream: Stream, chunk: Chunk, details: Arrays, final: bool) -> None:
        if final:
            self._close(stream)
            try:
                stream.sender.send(chunk, details, True)
            finally:
                self._on_closed(stream)
        else:
            stream.sender.send(chunk, details, False)

    def _end_with_error(self, stream: Stream, status: str, message: str) -> None:
        if stream.closed:
            return
        self._close(stream)
        unfinished = [sequence.uid for sequence in stream.sequences if not sequence.reason]
        if unfinished:
            self._abort(unfinished, FinishReason.CANCELLED)
        started = tuple(sequence.uid for sequence in stream.sequences if sequence.credit.sent)
        try:
            if stream.confirmed and started:
                # In the queue of its chunks, so that none of them is overtaken: an ensemble drops what comes after an
                # error, and Triton 2.51 then never finishes the request.
                number = self._credits.number(stream.sequences[0].credit)
                chunk = Chunk(uid=stream.uids[0], number=number, failure=(status, message), forget=started)
                stream.sender.send(chunk, {}, True)
            else:
                stream.sender.fail(status, message)
        finally:
            self._on_closed(stream)

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._count_lock:
            self._num_streams += change
            for queue in self._queues:
                queue.fit(self._num_streams)


def _text_options(stream: Stream) -> TextOptions:
    options = stream.spec.options
    return TextOptions(
        skip_special_tokens=options.skip_special_tokens,
        prompt=options.prompt,
        prompt_tail=stream.prompt_tail,
        prompt_ids=options.prompt_ids,
    )


def streams_of(sequences: Mapping[int, SequenceStream]) -> list[Stream]:
    """The streams that these sequences (by uid) belong to, each once."""
    return list({id(sequence.stream): sequence.stream for sequence in list(sequences.values())}.values())
