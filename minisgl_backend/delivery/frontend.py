"""One front of the engine: passes requests to its cores and records to the responder, aborts requests without a
client."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minisgl_backend.arrays import Int32Array, Int64Array
from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.admin_commands import AdminCommands
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.delta import Sender
from minisgl_backend.delivery.engine_client import EngineClient, Listener
from minisgl_backend.delivery.health_probe import PROBE_AFTER_S, HealthProbe
from minisgl_backend.delivery.output_fields import OutputFieldEncoder
from minisgl_backend.delivery.pooled import PooledRequests
from minisgl_backend.delivery.responder import Responder
from minisgl_backend.delivery.stream import SequenceStream, Stream, append_outputs, streams_of
from minisgl_backend.delivery.taken_images import TakenImages, discard
from minisgl_backend.errors import CapacityError, EngineDeadError, InvalidRequestError, status_of
from minisgl_backend.ipc.adapter_table import AdapterStates
from minisgl_backend.ipc.messages import CANCELLED, Outputs, Rejected, Welcome
from minisgl_backend.ipc.wire import Chunk, EngineRequest
from minisgl_backend.process.status_files import drain_deadline, drained_mark, lost_at
from minisgl_backend.request import MAX_PRIORITY, FinishReason, Request, check_token_ids
from minisgl_backend.text.vocabulary import Vocabulary

SILENCE_S = 30.0  # then the detokenizer itself is stuck or dead
POLL_EVERY_S = 0.1  # for senders that can report that their client left, and for news from the supervisor
SHUTTING_DOWN = "the server is shutting down"
DETOKENIZER_DIED = "the detokenizer died while it wrote this answer; it starts again by itself"

_LOGGER = logging.getLogger(__name__)
_REJECTIONS = {kind.__name__: kind for kind in (InvalidRequestError, CapacityError)}


class EngineFront(Listener):
    """Lives as long as its Triton model instance.

    `probe(chunk)` sends an empty chunk to the detokenizer, after all chunks sent so far, and returns when it was
    handled.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocabulary: Vocabulary,
        *,
        front: int,
        socket_dir: Path,
        probe: Callable[[Chunk], None],
        admin_key: str = "",
        name: str = "",
        num_workers: int = 2,
        make_client: Callable[..., Any] = EngineClient,
    ) -> None:
        """`admin_key`: of whoever gives commands; "": nobody can. `name`: the model's, which no adapter may have."""
        self._vocabulary = vocabulary
        self._vocab_size = 0  # known once the engine is up; nothing is submitted before
        self._drained = drained_mark(socket_dir, front)
        self._draining = False  # new requests are refused
        self._detokenizer_lost_at: float | None = None
        self._sequences: dict[int, SequenceStream] = {}  # by uid; those that the engine still computes
        # Probes are answered within milliseconds; on a busy machine silence alone proves nothing.
        self.credits = StreamCredits(num_workers, silence_s=SILENCE_S)
        self.client = make_client(config, self, front=front, socket_dir=socket_dir, credits=self.credits)
        self.adapter_states = AdapterStates(socket_dir)
        self.commands = AdminCommands(config, self.client, socket_dir, key=admin_key, reserved=(name,))
        self._pooled = PooledRequests(self.client)
        self._images = TakenImages()
        self.responder = Responder(
            credits=self.credits,
            abort=self.client.abort,
            on_closed=self._on_closed,
            details=OutputFieldEncoder(vocabulary),
            num_workers=num_workers,
        )
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._health_probe = HealthProbe(
            probe=probe, is_silent=self._is_silent, credits=self.credits, sending=self.responder.sending
        )
        self._last_acknowledged = 0.0

    def start(self, timeout_s: float | None = None) -> None:
        """Waits for the cores. Raises ConfigError or EngineDeadError."""
        self.client.start(timeout_s)
        self._detokenizer_lost_at = lost_at(self._drained.parent, "detokenizer")
        self._health_probe.start([self.client.new_uid() for _ in range(self.responder.num_workers)])
        self._watcher.start()

    def submit(self, sender: Sender, token_ids: Int32Array, spec: EngineRequest, *, confirmed: bool) -> None:
        """Passes a request to a core; all responses, errors included, go to `sender`."""
        try:
            self._check(token_ids, spec)
            uid = 0 if spec.poolings else self.client.new_uid(spec.params.n)
            contents = self._images.take(uid, spec.contents) if spec.contents else ()
        except (InvalidRequestError, CapacityError) as error:
            discard(spec.contents)
            sender.fail(status_of(error), str(error))
            return
        if spec.poolings:
            self._pooled.submit(sender, token_ids, spec, self._vocab_size)
            return
        if contents:
            self.responder.latency.on_images(len(contents), spec.decode_s)
        stream = Stream(
            sender, spec, uid, token_ids, self._vocabulary, self.responder.queue_for(uid), confirmed=confirmed
        )
        self.responder.adopt()
        # All at once: if another thread fails the request meanwhile, `_on_closed` removes all of them again.
        self._sequences.update({sequence.uid: sequence for sequence in stream.sequences})
        if self._draining:  # checked again: the thread that waits for the last stream may not have seen this one
            stream.fail("UNAVAILABLE", SHUTTING_DOWN)
        request = Request(
            uid=uid,
            token_ids=token_ids.astype("<i4", copy=False).tobytes(),
            params=spec.params,
            priority=spec.priority,
            deadline=spec.deadline,
            request_id=spec.request_id,
            tenant=spec.tenant,
            contents=contents,
            stable_len=spec.stable_len,
            borders=spec.borders,
        )
        try:
            self.client.submit(request)
        except (EngineDeadError, CapacityError, InvalidRequestError) as error:
            stream.fail(status_of(error), str(error))
        if stream.closed:
            # It was failed meanwhile, and the abort may have overtaken the request: the core would compute for no
            # client.
            self.client.abort(stream.uids, FinishReason.CANCELLED)

    def stop_requests(self, request_id: str) -> None:
        """Ends the running requests with this client-given id; they keep what they have, as if the model had ended
        them."""
        for stream in streams_of(self._sequences):
            if stream.spec.request_id == request_id:
                self.client.abort(stream.uids, FinishReason.STOP)
        self._pooled.stop(request_id)

    def _check(self, token_ids: Int32Array, spec: EngineRequest) -> None:
        """Checks what the tokenizer guarantees but a client of the bare engine may violate: it could crash the core."""
        if self._draining:
            raise CapacityError(SHUTTING_DOWN)
        spec.params.validate(self._vocab_size)
        check_token_ids("input_ids", token_ids, self._vocab_size)
        if not 0 <= spec.priority <= MAX_PRIORITY:
            raise InvalidRequestError(f"spec.priority is {spec.priority}; allowed: 0 to {MAX_PRIORITY}")

    @property
    def num_streams(self) -> int:
        return len(streams_of(self._sequences)) + len(self._pooled)

    def close(self, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` for running requests, ends the rest with an error, then stops everything."""
        deadline = time.monotonic() + drain_s
        while (self._sequences or self._pooled.by_uid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._stopping.set()
        for stream in streams_of(self._sequences):
            stream.fail("UNAVAILABLE", SHUTTING_DOWN)
        self._pooled.fail_all("UNAVAILABLE", SHUTTING_DOWN)
        self._pooled.close()
        self.responder.close()
        if self._watcher.is_alive():
            self._watcher.join(2.0)
        self._health_probe.close(2.0)
        self.commands.close()
        self.client.close()
        self._images.close()

    # Callbacks of the client's receive thread.

    def on_outputs(self, outputs: Outputs) -> None:
        append_outputs(self._sequences, outputs)
        if self._pooled.by_uid:
            self._pooled.take(outputs)

    def on_rejected(self, rejected: Rejected) -> None:
        sequence = self._sequences.get(rejected.uid)
        error = _REJECTIONS.get(rejected.kind, CapacityError)(rejected.message)
        if sequence is not None:
            sequence.stream.fail(status_of(error), rejected.message)
        else:
            self._pooled.reject(rejected.uid, error)

    def on_down(self, uids: list[int], reason: str) -> None:
        self._pooled.fail(uids, "UNAVAILABLE", reason)
        self._fail({uid: sequence for uid in uids if (sequence := self._sequences.get(uid)) is not None}, reason)

    def _fail(self, sequences: Mapping[int, SequenceStream], reason: str) -> None:
        """Ends the streams of these sequences with an error."""
        streams = streams_of(sequences)
        if streams:
            names = ", ".join(repr(stream.spec.request_id or f"uid {stream.uids[0]}") for stream in streams)
            _LOGGER.error("%s; requests told so (%d): %s", reason, len(streams), names)
        for stream in streams:
            stream.fail("UNAVAILABLE", reason)

    def on_up(self, welcome: Welcome) -> None:
        self.responder.note_up(welcome.page_size)
        self._vocab_size = welcome.vocab_size

    def on_acknowledged(self, uids: Int64Array, sequence_numbers: Int32Array) -> None:
        self._last_acknowledged = time.monotonic()
        sequences = self._sequences
        for uid, number in zip(uids.tolist(), sequence_numbers.tolist(), strict=True):
            if (sequence := sequences.get(uid)) is None:
                continue
            if number == CANCELLED:
                self._abandon(sequence.stream)
            else:
                sequence.note_acknowledged()

    def on_lost(self, uids: list[int]) -> None:
        for uid in uids:
            if (sequence := self._sequences.get(uid)) is not None:
                self.responder.on_dropped_chunk(sequence.stream)

    def _abandon(self, stream: Stream) -> None:
        """The client has aborted the sequence whose chunk revealed it; the request's other sequences go on."""
        stream.abandon()
        if len(stream.sequences) > 1:
            self.client.abort(stream.uids, FinishReason.CANCELLED, time.monotonic())

    # Callbacks of the responder's threads.

    def _on_closed(self, stream: Stream) -> None:
        for uid in stream.uids:
            self._sequences.pop(uid, None)
            self.credits.close(uid)
        self._images.remove(stream.uids[0])

    # The watcher thread. It never waits for the detokenizer.

    def _watch(self) -> None:
        while not self._stopping.wait(POLL_EVERY_S):
            try:
                self._poll_senders()
                self._notice_lost_detokenizer()
                self._drain(time.monotonic())
            except Exception:  # the watcher must go on: without it cancelled requests run to their end
                _LOGGER.exception("the watcher of cancelled requests failed; it goes on")

    def _notice_lost_detokenizer(self) -> None:
        """Ends all streams: for a dead detokenizer, tritonserver would fail the waiting requests at one per second."""
        lost = lost_at(self._drained.parent, "detokenizer")
        if lost == self._detokenizer_lost_at:
            return
        self._detokenizer_lost_at = lost
        for stream in streams_of(self._sequences):
            stream.stop_confirming()
        self._fail(self._sequences, DETOKENIZER_DIED)
        self._health_probe.restart()

    def _drain(self, now: float) -> None:
        """Called when the server is to end: once tritonserver has begun to stop, it lets no chunk through."""
        deadline = drain_deadline(self._drained.parent)
        if deadline is None:
            return
        self._draining = True
        if now >= deadline:
            for stream in streams_of(self._sequences):
                stream.fail("UNAVAILABLE", SHUTTING_DOWN)
            self._pooled.fail_all("UNAVAILABLE", SHUTTING_DOWN)
        if not self._sequences and not self._pooled.by_uid:
            self._drained.touch(0o600)

    def _poll_senders(self) -> None:
        if self._pooled.by_uid:
            self._pooled.poll()
        for stream in streams_of(self._sequences):
            if not stream.is_paced and not stream.closed and stream.sender.is_cancelled():
                self.client.abort(stream.uids, FinishReason.CANCELLED, time.monotonic())

    # The probe's thread.

    def _is_silent(self, now: float) -> bool:
        if now - max(self._last_acknowledged, self.responder.last_sent) < PROBE_AFTER_S:
            return False
        return any(one.num_unacknowledged > 0 for one in list(self._sequences.values()))
