"""Sends what the engine computed: sender threads that own each response sender until its last response.

* A stream belongs to one thread for ever, which keeps its order. * While a stream keeps up, every token is a response
of its own, the first one sent at once. A stream with too many   unacknowledged responses waits (backpressure), and its
tokens gather into one larger response. * The last response of a request carries the final flag; cancelled and failed
requests end with one error that carries it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.delta import Delta
from minisgl_backend.delivery.output_fields import OutputFieldEncoder
from minisgl_backend.delivery.send_queue import SendQueue
from minisgl_backend.delivery.stream import SequenceStream, Stream
from minisgl_backend.ipc.histogram import Histogram
from minisgl_backend.ipc.wire import Chunk, TextOptions
from minisgl_backend.request import FinishReason

MAX_UNCONFIRMED = 128  # responses between front and detokenizer, over all streams; each stream may have one

NO_TEXT = (
    "the requested outputs lack text_output (output_ids of tensorrt_llm); allowed with stream=true: it and others, "
    "or none by name"
)
LATE = "the request was cancelled: its timeout has passed"

FIRST_TOKEN_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
QUEUE_BOUNDS_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WHOLE_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
DECODE_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_BOUNDS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
INTER_TOKEN_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_LOGGER = logging.getLogger(__name__)


class LatencyRecorder:
    """Time to first token (TTFT) and inter-token latency (ITL), taken when a sender thread takes tokens over; of each
    request that is answered its time in the queue, its whole time and its lengths.

    Cheap enough for every token; thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.queued = Histogram(QUEUE_BOUNDS_S)
        self.whole = Histogram(WHOLE_BOUNDS_S)
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.generated_tokens = Histogram(TOKEN_BOUNDS)
        self.image_decode, self.num_images = Histogram(DECODE_BOUNDS_S), 0

    def on_images(self, count: int, seconds: float) -> None:
        """A request with so many images has come, whose decoding took, and waited, so long."""
        with self._lock:
            self.num_images += count
            self.image_decode.observe(seconds)

    def on_tokens(self, sequence: SequenceStream, num_tokens: int) -> None:
        """`num_tokens` of the sequence are about to be sent; if there are several, they share their time equally."""
        since_arrival, since_last = sequence.time_tokens(time.monotonic())
        with self._lock:
            if since_arrival is not None:
                self.first_token.observe(since_arrival)
            if since_last is not None:
                self.inter_token.observe(since_last / num_tokens, num_tokens)
            else:
                self.inter_token.observe(0.0, num_tokens - 1)

    def on_answered(self, stream: Stream) -> None:
        """The stream's last response is being sent."""
        with self._lock:
            self.queued.observe(max(0, stream.first_scheduled_ns - stream.arrival_ns) / 1e9)
            self.whole.observe((time.time_ns() - stream.arrival_ns) / 1e9)
            self.prompt_tokens.observe(stream.num_input_tokens)
            for sequence in stream.sequences:
                self.generated_tokens.observe(sequence.num_tokens)


class Responder:
    """Sender threads and their queues.

    `credits` counts what was sent; `abort(uids, reason)` tells the engine to stop; `on_closed(stream)` is called once
    for each stream, on its thread, when its last response is out.
    """

    def __init__(
        self,
        *,
        credits: StreamCredits,
        abort: Callable[[Iterable[int], FinishReason], None],
        on_closed: Callable[[Stream], None],
        details: OutputFieldEncoder,
        num_workers: int = 2,
    ) -> None:
        self._credits = credits
        self._abort = abort
        self._on_closed = on_closed
        self._details = details
        self.latency = LatencyRecorder()
        self._page_size = 1  # for perf metrics; known once the engine is up
        self._num_streams = 0
        self._limit = MAX_UNCONFIRMED  # responses of each stream between front and detokenizer
        self._count_lock = threading.Lock()
        self._queues: list[SendQueue[SequenceStream]] = [SendQueue(credits, worker) for worker in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"responder-{worker}", daemon=True)
            for worker in range(num_workers)
        ]
        self.sending = [queue.sending for queue in self._queues]
        self.last_sent = 0.0  # time.monotonic() of the last response
        for thread in self._threads:
            thread.start()

    @property
    def num_workers(self) -> int:
        return len(self._threads)

    def note_up(self, page_size: int) -> None:
        """The engine is up, with pages of `page_size` tokens."""
        self._page_size = page_size

    def queue_for(self, uid: int) -> SendQueue[SequenceStream]:
        """The queue of the thread that will serve the stream with this uid."""
        return self._queues[uid % len(self._queues)]

    def adopt(self) -> None:
        """There is a new stream. Called before its request reaches the engine."""
        self._count(1)

    def on_dropped_chunk(self, stream: Stream) -> None:
        """The server has dropped a chunk of the stream, since its client has left. If it dropped all of them, the
        client may have requested outputs by name, and the ensemble leaves out models whose outputs were not
        requested."""
        if not stream.was_acknowledged:
            stream.stop_confirming()
            stream.fail("INVALID_ARG", NO_TEXT)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads; what was queued before is still sent."""
        for queue in self._queues:
            queue.close()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self, worker: int) -> None:
        queue = self._queues[worker]
        while (sequence := queue.next()) is not None:
            try:
                self._serve(sequence)
            except Exception as error:  # one stream's failure must not end the others
                _LOGGER.exception("request %r (stream %d) failed", sequence.stream.spec.request_id, sequence.uid)
                self._end_failed(sequence.stream, f"the answer could not be sent: {error}")

    def _end_failed(self, stream: Stream, message: str) -> None:
        """Ends a stream whose response could not be sent. If that was its last response, or its error cannot follow its
        chunks either, an error is sent alone: it is small and may get through."""
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
            self._end_with_error(stream, *sequence.failure)
        elif stream.abandoned and not reason:
            return  # its end is being sent
        elif not sequence.finished and (reason or (sequence.eager and not sequence.must_wait(self._limit))):
            self._advance(sequence)

    def _end_cancelled(self, sequence: SequenceStream) -> None:
        stream = sequence.stream
        if stream.confirmed and not stream.abandoned and stream.has_sent and not stream.was_acknowledged:
            # `note_acknowledged` or `on_dropped_chunk` soon tells whether any of it reaches the detokenizer: an error
            # behind dropped chunks would be dropped, too.
            return
        self._end_with_error(stream, "CANCELLED", LATE if stream.is_late else "the request was cancelled")

    def _advance(self, sequence: SequenceStream) -> None:
        delta = sequence.gather()
        if delta is None:
            return
        stream = sequence.stream
        if delta.num_tokens:
            self.latency.on_tokens(sequence, delta.num_tokens)
        if delta.reason and not sequence.reason:  # a stop string, which the engine does not know
            self._abort((sequence.uid,), FinishReason.STOP)
        if stream.spec.options.stream:
            if delta.reason or delta.part.text != "":
                self._send_delta(sequence)
        elif stream.spec.options.apart:
            if delta.reason:
                self._send_delta(sequence)
        elif stream.is_complete:
            self._send_whole(stream)

    def _send_delta(self, sequence: SequenceStream) -> None:
        stream = sequence.stream
        final = stream.is_complete
        delta = sequence.take()
        first = sequence.credit.sent == 0
        details = self._encode_details(stream, (delta,), first=first, final=final)
        options = _text_options(stream) if first else None
        chunk = partial(
            Chunk, uid=sequence.uid, parts=(delta.part,), options=options, token_ids=stream.spec.options.token_ids
        )
        if final or not stream.confirmed:
            self._send(stream, chunk(number=self._credits.number(sequence.credit)), details, final)
            return
        with stream.queue.sending:
            now = self.last_sent = time.monotonic()
            number = self._credits.send(sequence.credit, now)
            ask = stream.queue.asks_for_ack() or first or sequence.num_unacknowledged >= self._limit
            stream.sender.send(chunk(number=number, confirm=ask), details, False)

    def _send_whole(self, stream: Stream) -> None:
        deltas = [sequence.take() for sequence in stream.sequences]
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
        metrics = stream.metrics(self._page_size, final=final)
        return self._details.encode(stream, deltas, first=first, metrics=metrics)

    def _send(self, stream: Stream, chunk: Chunk, details: Arrays, final: bool) -> None:
        if final:
            self.latency.on_answered(stream)
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
                # In its chunks' queue, so that it overtakes none of them: an ensemble drops what comes after an error,
                # and Triton 2.51 then never finishes the request.
                number = self._credits.number(stream.sequences[0].credit)
                chunk = Chunk(uid=stream.uids[0], number=number, failure=(status, message), forget=started)
                stream.sender.send(chunk, {}, True)
            else:
                stream.sender.fail(status, message)
        finally:
            self._on_closed(stream)

    def _close(self, stream: Stream) -> None:
        stream.close()
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._count_lock:
            self._num_streams += change
            self._limit = max(1, MAX_UNCONFIRMED // max(1, self._num_streams))
            for queue in self._queues:
                queue.fit(self._num_streams)


def _text_options(stream: Stream) -> TextOptions:
    options = stream.spec.options
    return TextOptions(
        skip_special_tokens=stream.spec.params.skip_special_tokens,
        prompt=options.prompt,
        all_so_far=options.llmapi,
        prompt_tail=stream.prompt_tail,
        prompt_ids=options.prompt_ids,
    )
