"""Requests whose answers are vectors: a front passes their prompts to the cores and responds once all are computed.

One response for all prompts of a request, so that a list of texts costs one pass through the server.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np

from minisgl_backend.arrays import Float32Array, Int32Array
from minisgl_backend.delivery.arrays import Arrays, ints
from minisgl_backend.delivery.delta import Sender
from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError, status_of
from minisgl_backend.ipc.messages import Outputs
from minisgl_backend.ipc.wire import Chunk, EngineRequest, Part, TextOptions
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.step import SequenceDetail
from minisgl_backend.text import scoring

_LOGGER = logging.getLogger(__name__)

# Prompts of one request at the cores at a time: enough for full steps, few enough that other requests need not wait for
# a list of thousands.
MOST_SEQUENCES = 128
MOST_TOKENS = 16384
CANCELLED = "the request was cancelled"


class PooledRequest:
    """One request. Written under the lock of its `PooledRequests`."""

    def __init__(self, sender: Sender, spec: EngineRequest, prompts: Sequence[Int32Array], first_uid: int) -> None:
        self.sender = sender
        self.spec = spec
        self.prompts = prompts
        self.uids = range(first_uid, first_uid + len(prompts))
        self.vectors: list[bytes | None] = [None] * len(prompts)
        self.cached_tokens = 0
        self.num_sent = 0
        self.num_done = 0
        self.tokens_out = 0  # of the prompts at the cores
        self.ended = False
        self._most = MOST_SEQUENCES  # prompts allowed at the cores
        self._refused: list[int] = []  # prompts that a full queue refused, to be sent again once others are done

    @property
    def in_flight(self) -> Iterable[int]:
        """Uids that the cores may know."""
        return (uid for uid, vector in zip(self.uids[: self.num_sent], self.vectors, strict=False) if vector is None)

    def next_request(self) -> Request | None:
        """The next prompt to send to a core; None if enough are there, or all were sent."""
        index = self._refused[-1] if self._refused else self.num_sent
        if self.ended or index == len(self.prompts) or self._num_out >= self._most:
            return None
        if self.spec.leads and index and not self.num_done:
            return None
        tokens = self.prompts[index]
        if self.tokens_out and self.tokens_out + len(tokens) > MOST_TOKENS:
            return None
        if self._refused:
            self._refused.pop()
        else:
            self.num_sent += 1
        self.tokens_out += len(tokens)
        spec = self.spec
        return Request(
            uid=self.uids[index],
            token_ids=tokens.astype("<i4", copy=False).tobytes(),
            params=spec.params,
            pooling=spec.poolings[min(index, len(spec.poolings) - 1)],
            priority=spec.priority,
            deadline=spec.deadline,
            request_id=spec.request_id,
            tenant=spec.tenant,
        )

    @property
    def _num_out(self) -> int:
        """Number of prompts at the cores."""
        return self.num_sent - self.num_done - len(self._refused)

    def put_back(self, uid: int) -> bool:
        """A full queue refused this prompt. False: none of the request's other prompts is at a core, so none will make
        room."""
        if self.ended or self._num_out < 2:
            return False
        index = uid - self.uids.start
        self._refused.append(index)
        self.tokens_out -= len(self.prompts[index])
        self._most = self._num_out
        return True

    def take(self, uid: int, detail: SequenceDetail) -> bool:
        """Takes the vector of one prompt. True: it was the last one."""
        index = uid - self.uids.start
        self.vectors[index] = detail.pooled
        self.cached_tokens += detail.cached_tokens or 0
        self.num_done += 1
        self.tokens_out -= len(self.prompts[index])
        return self.num_done == len(self.prompts)

    def answer(self) -> tuple[Chunk, Arrays]:
        """The only response."""
        vectors = [np.frombuffer(vector or b"", dtype="<f4") for vector in self.vectors]
        if self.spec.options.vector_as_text:
            part = Part(text=json.dumps(vectors[0].tolist()), is_last=True)
            return Chunk(uid=self.uids.start, number=1, parts=(part,), options=TextOptions()), {}
        return Chunk(uid=self.uids.start, number=1), self._arrays(vectors)

    def _arrays(self, vectors: Sequence[Float32Array]) -> Arrays:
        arrays: Arrays = {
            "prompt_lengths": ints([len(prompt) for prompt in self.prompts]),
            "num_cached_tokens": ints([self.cached_tokens]),
        }
        if self.spec.scoring:
            way: Any = self.spec.scoring
            raw = self.spec.raw_scores
            arrays["score"] = scoring.scores(way, vectors, self.spec.num_queries, raw=raw)[None]
            return arrays
        width = max(len(vector) for vector in vectors)
        rows = np.zeros((1, len(vectors), width), dtype=np.float32)  # choices may differ in number
        for index, vector in enumerate(vectors):
            rows[0, index, : len(vector)] = vector
        return {"embedding": rows, **arrays}


class PooledRequests:
    """All such requests of one front. Thread-safe; a thread of its own sends the answers."""

    def __init__(self, client: Any) -> None:
        """`client`: an EngineClient."""
        self._client = client
        self._lock = threading.Lock()
        self.by_uid: dict[int, PooledRequest] = {}  # those that have not ended; written only by this class
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="pooled")

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open())

    def submit(self, sender: Sender, token_ids: Int32Array, spec: EngineRequest, vocab_size: int) -> None:
        """Passes a request to the cores; all responses, errors included, go to `sender`. `token_ids`: the concatenated
        prompts."""
        try:
            prompts = _split(token_ids, spec, vocab_size)
        except InvalidRequestError as error:
            sender.fail(status_of(error), str(error))
            return
        request = PooledRequest(sender, spec, prompts, self._client.new_uid(len(prompts)))
        with self._lock:
            self.by_uid.update(dict.fromkeys(request.uids, request))
        self._feed(request)

    def take(self, outputs: Outputs) -> None:
        """Receive thread: takes the records of a step; those of other requests are ignored."""
        uids = np.frombuffer(outputs.uids, dtype="<i8").tolist()
        for index, (uid, reason) in enumerate(zip(uids, outputs.reasons, strict=True)):
            request = self.by_uid.get(uid)
            if request is not None and reason:
                self._take(request, uid, reason, outputs.details.get(index, SequenceDetail()))

    def fail(self, uids: Iterable[int], status: str, message: str) -> None:
        """Ends the requests that these uids belong to; unknown uids are ignored."""
        requests = {id(one): one for uid in uids if (one := self.by_uid.get(uid)) is not None}
        for request in requests.values():
            self._fail(request, status, message)

    def reject(self, uid: int, error: MinisglError) -> None:
        """A core refused this prompt. If the queue is full of this request's own prompts, the request waits."""
        request = self.by_uid.get(uid)
        if request is not None:
            self._on_refused(request, uid, error)

    def fail_all(self, status: str, message: str) -> None:
        for request in self._open():
            self._fail(request, status, message)

    def stop(self, request_id: str) -> None:
        """Ends the running requests with this client-given id: the client has left."""
        for request in self._open():
            if request.spec.request_id == request_id:
                self._fail(request, "CANCELLED", CANCELLED)

    def poll(self) -> None:
        """Ends the requests whose senders know that the client has left."""
        for request in self._open():
            if not request.ended and request.sender.is_cancelled():
                self._fail(request, "CANCELLED", CANCELLED)

    def close(self) -> None:
        """What was queued before is still sent."""
        self._answering.shutdown(wait=True)

    def _open(self) -> list[PooledRequest]:
        with self._lock:
            return list({id(one): one for one in self.by_uid.values()}.values())

    def _take(self, request: PooledRequest, uid: int, reason: int, detail: SequenceDetail) -> None:
        if reason != FinishReason.STOP or not detail.pooled:
            failure = (detail.status, detail.error) if reason == FinishReason.ERROR else ("CANCELLED", CANCELLED)
            self._fail(request, *failure)
            return
        with self._lock:
            done = request.take(uid, detail)
            self.by_uid.pop(uid, None)
        if done:
            self._end(request, lambda: request.sender.send(*request.answer(), True))
        else:
            self._feed(request)

    def _feed(self, request: PooledRequest) -> None:
        while True:
            with self._lock:
                following = request.next_request()
            if following is None:
                return
            try:
                self._client.submit(following)
            except MinisglError as error:
                self._on_refused(request, following.uid, error)
                return
            if request.ended:  # meanwhile: its abort may have overtaken the prompt
                self._client.abort([following.uid], FinishReason.CANCELLED)
                return

    def _on_refused(self, request: PooledRequest, uid: int, error: MinisglError) -> None:
        with self._lock:
            waits = isinstance(error, CapacityError) and request.put_back(uid)
        if not waits:
            self._fail(request, status_of(error), str(error))

    def _fail(self, request: PooledRequest, status: str, message: str) -> None:
        uids = list(request.in_flight)
        if self._end(request, lambda: request.sender.fail(status, message)):
            self._client.abort(uids, FinishReason.CANCELLED)

    def _end(self, request: PooledRequest, answer: Callable[[], None]) -> bool:
        """False if it had already ended."""
        with self._lock:
            if request.ended:
                return False
            request.ended = True
            for uid in request.uids:
                self.by_uid.pop(uid, None)
        self._answering.submit(self._answer, request, answer)
        return True

    def _answer(self, request: PooledRequest, answer: Callable[[], None]) -> None:
        try:
            answer()
        except Exception as error:  # the client waits for a response
            _LOGGER.exception("a pooled request cannot be answered")
            request.sender.fail("INTERNAL", f"the request could not be answered ({type(error).__name__})")


def _split(token_ids: Int32Array, spec: EngineRequest, vocab_size: int) -> list[Int32Array]:
    """The prompts. Raises InvalidRequestError for input that the tokenizer would not have made."""
    lengths = np.frombuffer(spec.lengths, dtype="<i4")
    if not len(lengths) or lengths.min() < 1 or int(lengths.sum()) != len(token_ids):
        raise InvalidRequestError("spec.lengths does not fit input_ids; allowed: the length of each prompt")
    if len(spec.poolings) not in (1, len(lengths)) or spec.scoring not in ("", *get_args(scoring.Scoring)):
        raise InvalidRequestError("spec.poolings does not fit; allowed: one, or one for each prompt")
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidRequestError(f"input_ids holds others than token ids; allowed: 0 to {vocab_size - 1}")
    for pooling in spec.poolings:
        pooling.validate(1 << 31, vocab_size)
    return np.split(token_ids, np.cumsum(lengths[:-1]))
