"""Publishes what the prefix cache stores and removes, in the format of vLLM's KV events, over ZeroMQ.

A router in front of several servers can track which of them caches a prefix. Each message on the PUB socket is
[topic, sequence number (8 bytes, big-endian), payload]; a payload is the MessagePack of

    [ts, events, data_parallel_rank]
    events:  ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
              extra_keys]
             ["BlockRemoved", block_hashes, medium]
             ["AllBlocksCleared"]

`extra_keys` is null, or has an entry for each block: [cache_salt] for the first block of a prompt with a salt, else
null; with an adapter ["adapter:DIGEST"], and the salt behind it. Token ids from 2**62 on stand for other content
(`cache/content_ids.py`).

Sequence numbers start at 0 with the engine core. Its first batch says AllBlocksCleared, and so does the first one with
blocks: a subscriber may not be connected yet when the very first one is sent. A subscriber that has missed batches
sends the first missing number, 8 bytes, to the replay socket, a ROUTER, and gets [number, payload] for each batch that
is still kept, then [-1, empty]; `kv_replay` bounds the cost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl_backend.cache.changes import CacheChange, PagesStored
from minisgl_backend.cache.salt import salt_keys
from minisgl_backend.engine.kv_replay import KVReplay
from minisgl_backend.errors import ConfigError

log = logging.getLogger(__name__)

MEDIUM = "GPU"  # the format's word for the memory that the engine computes in, whatever the device
QUEUED_BATCHES = 10_000  # for one subscriber that does not read; later ones are lost to it
LINGER_MS = 500  # for batches still to be sent when the core ends
_CONNECT_MS = 1000  # within which a subscriber that listens takes the connection


class _Listener:
    """Logs whether anybody listens at an address that the socket connects to: ZeroMQ itself never tells."""

    def __init__(self, publisher: zmq.Socket[bytes], address: str) -> None:
        self._publisher = publisher
        self._address = address
        self._is_there: bool | None = None
        events = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        self._monitor = publisher.get_monitor_socket(events)
        publisher.connect(address)
        if self._monitor.poll(_CONNECT_MS):
            self.look()
        else:
            self._note(False)

    def look(self) -> None:
        """Logs what has changed; never waits."""
        while self._monitor.poll(0):
            self._note(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"] == zmq.EVENT_CONNECTED)

    def _note(self, is_there: bool) -> None:
        if is_there == self._is_there:
            return
        self._is_there = is_there
        if is_there:
            log.info("KV events: a subscriber listens at %s", self._address)
        else:
            how = "allowed: also tcp://*:PORT, to listen here"
            log.warning("KV events: nobody listens at %s; they are lost until somebody does; %s", self._address, how)

    def close(self) -> None:
        self._publisher.disable_monitor()
        self._monitor.close(linger=0)


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # seconds since the epoch
    events: list[KVEvent]
    data_parallel_rank: int


class KVEventPublisher:
    """The publisher of one engine core; used by the thread that made it. Publishing never waits for a subscriber."""

    def __init__(
        self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "", page_size: int, dp_rank: int = 0
    ) -> None:
        """An endpoint whose host is `*`, or an ipc one, is bound; any other is connected to. See `endpoint_of`.

        Raises ConfigError for an address that cannot be used.
        """
        self._topic = topic.encode()
        self._page_size = page_size
        self._dp_rank = dp_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self._listener: _Listener | None = None
        self._replay = None if replay_endpoint is None else KVReplay(self._context)
        try:
            self._start("kv_events_endpoint", endpoint_of(endpoint, dp_rank), self._attach)
            if self._replay is not None and replay_endpoint is not None:
                self._start("kv_events_replay_endpoint", endpoint_of(replay_endpoint, dp_rank), self._replay.start)
        except ConfigError:
            self.close()
            raise
        self._send([AllBlocksCleared()])

    @staticmethod
    def _start(option: str, address: str, start: Callable[[str], None]) -> None:
        try:
            start(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{option} is {address!r}: {error}; allowed: tcp://*:PORT or ipc://PATH to listen at, or "
                "tcp://HOST:PORT of a subscriber that listens"
            ) from None

    def _attach(self, address: str) -> None:
        if "*" in address or "::" in address or address.startswith("ipc://"):
            self._publisher.bind(address)
        else:
            self._listener = _Listener(self._publisher, address)

    def publish(self, changes: Sequence[CacheChange]) -> None:
        """Publishes a step's changes, in order, as one batch."""
        first: list[KVEvent] = [AllBlocksCleared()] if self._next == 1 else []
        self._send(first + [self._event(change) for change in changes])

    def _event(self, change: CacheChange) -> KVEvent:
        if isinstance(change, PagesStored):
            return BlockStored(
                block_hashes=change.hashes,
                parent_block_hash=change.parent,
                token_ids=change.token_ids.tolist(),
                block_size=self._page_size,
                extra_keys=_extra_keys(change),
            )
        return BlockRemoved(block_hashes=change.hashes)

    def _send(self, events: list[KVEvent]) -> None:
        batch = KVEventBatch(ts=time.time(), events=events, data_parallel_rank=self._dp_rank)
        payload, number = self._encoder.encode(batch), self._next
        self._next += 1
        if self._replay is not None:
            self._replay.keep(number, payload)
        if self._listener is not None:
            self._listener.look()
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """Ends the sockets."""
        if self._replay is not None:
            self._replay.close(LINGER_MS)
        if self._listener is not None:
            self._listener.close()
        self._publisher.close(linger=LINGER_MS)
        self._context.term()


def _extra_keys(change: PagesStored) -> list[tuple[str, ...] | None] | None:
    return [salt_keys(change.salt), *[None] * (len(change.hashes) - 1)] if change.salt else None


def endpoint_of(endpoint: str, dp_rank: int) -> str:
    """The address of engine core `dp_rank`: that number is added to a TCP port, or appended to a path."""
    if dp_rank == 0:
        return endpoint
    before, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{before}{colon}{int(port) + dp_rank}"
    return f"{endpoint}-{dp_rank}"
