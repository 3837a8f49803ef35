"""KV events of running engine cores, read by a subscriber made from the published format alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from tests.integration.conftest import START_SECONDS, Front, wait_for

PAGE = 16
TOPIC = "kv@test"


class Subscriber:
    """Follows one publisher: [topic, number, payload]; a payload is [ts, events, data_parallel_rank]."""

    def __init__(self, context: zmq.Context, address: str, replay_address: str, topic: str = TOPIC) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.socket.connect(address)
        self._ask_again = lambda first: replay(context, replay_address, first)
        self.live: dict[int, bytes] = {}  # payloads by number, as they came by themselves
        self.events: list[list[Any]] = []
        self.ranks: set[int] = set()
        self._next = 0

    def listen(self) -> None:
        while self.socket.poll(100):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == TOPIC.encode()
            assert len(number) == 8
            self.live[int.from_bytes(number, "big")] = payload

    def read(self) -> list[list[Any]]:
        """All events so far. What came before the subscription was there is asked for again."""
        self.listen()
        for number, payload in self._ask_again(self._next):
            assert number == self._next, "none is missing"
            assert self.live.get(number, payload) == payload
            self._next += 1
            ts, events, rank = msgspec.msgpack.decode(payload)
            assert ts > 1.6e9
            self.events += events
            self.ranks.add(rank)
        return self.events

    def stored(self) -> dict[int, tuple[int, ...]]:
        """Prefixes that are cached by now, by the hash of their last block."""
        found: dict[int, tuple[int, ...]] = {}
        for kind, *fields in self.read():
            if kind == "AllBlocksCleared":
                assert not fields
                found.clear()
            elif kind == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for value in hashes:
                    del found[value]
            else:
                assert kind == "BlockStored"
                hashes, parent, tokens, block_size, lora, medium, lora_name, extra_keys = fields
                assert (block_size, lora, medium, lora_name, extra_keys) == (PAGE, None, "GPU", None, None)
                assert len(tokens) == len(hashes) * block_size
                before = () if parent is None else found[parent]
                for place, value in enumerate(hashes, start=1):
                    found[value] = before + tuple(tokens[: place * block_size])
        return found


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def ask(front: Front, prompt: list[int], max_tokens: int = 20) -> list[int]:
    uid = front.submit(prompt, max_tokens=max_tokens)
    wait_for(lambda: uid in front.reasons)
    return front.tokens[uid]


def test_a_subscriber_knows_what_each_core_has_cached(
    make_front: Callable[..., Front], socket_dir: Path, context: zmq.Context
) -> None:
    address, replay_address = f"ipc://{socket_dir}/kv", f"ipc://{socket_dir}/replay"
    config = EngineConfig(
        runner="null",
        dp=2,
        num_pages=32,
        kv_events_endpoint=address,
        kv_events_replay_endpoint=replay_address,
        kv_events_topic=TOPIC,
    )
    front = make_front(config)
    subscribers = [Subscriber(context, address + end, replay_address + end) for end in ("", "-1")]
    other = Subscriber(context, address, replay_address, "another topic")
    prompts = [[5 + (seed * 50 + place) % 200 for place in range(100)] for seed in range(3)]
    answers = [ask(front, prompt) for prompt in prompts]  # the cores take turns
    assert ask(front, prompts[0] + answers[0]), "mostly cached"
    for core, seeds in enumerate(((0, 2), (1,))):
        found = set(subscribers[core].stored().values())
        for seed in seeds:
            text = tuple(prompts[seed] + answers[seed])
            assert {text[:end] for end in range(PAGE, 113, PAGE)} <= found
        assert subscribers[core].events[0] == ["AllBlocksCleared"]
        assert subscribers[core].ranks == {core}
        assert len(found) == front.stats(core).values["pages_cached"]
    for seed in range(3, 13):
        ask(front, [5 + (seed * 31 + place * 3) % 211 for place in range(200)])
    for core, subscriber in enumerate(subscribers):
        assert len(subscriber.stored()) == front.stats(core).values["pages_cached"]
        assert any(kind == "BlockRemoved" for kind, *_ in subscriber.events)
        assert len(subscriber.live) > 5, "they come by themselves"
    other.listen()
    assert not other.live
    assert [number for number, _ in replay(context, replay_address, 3)][:2] == [3, 4]
    assert replay(context, replay_address, 10**9) == []


def replay(context: zmq.Context, address: str, first: int) -> list[tuple[int, bytes]]:
    """What the publisher has kept of the batches from number `first` on."""
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        assert socket.poll(10_000), "no answer"
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if not payload:
            assert int.from_bytes(number, "big", signed=True) == -1
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def test_an_address_that_cannot_be_had_ends_the_start(socket_dir: Path, context: zmq.Context) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://*")
    front = Front(EngineConfig(runner="null", kv_events_endpoint=f"tcp://*:{port}"), socket_dir)
    with pytest.raises(ConfigError, match=rf"kv_events_endpoint is 'tcp://\*:{port}': Address already in use"):
        front.client.start(timeout_s=START_SECONDS)
    front.client.close()


def test_ports_of_several_cores_do_not_meet() -> None:
    ports = {"kv_events_endpoint": "tcp://*:5557", "kv_events_replay_endpoint": "tcp://*:5558"}
    assert EngineConfig(**ports).dp == 1  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_events_replay_endpoint is .*allowed with dp=2: a port 2 or more away"):
        EngineConfig(dp=2, **ports)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kv_events_replay_endpoint is 'ipc:///a', as .*allowed: an address of its"):
        EngineConfig(kv_events_endpoint="ipc:///a", kv_events_replay_endpoint="ipc:///a")


@pytest.mark.parametrize("address", ["5557", "tcp://*", "tcp://*:99999", "ipc://", "inproc://here"])
def test_wrong_addresses_are_refused(address: str) -> None:
    for option in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        with pytest.raises(ConfigError, match=f"{option} is .*allowed: tcp://"):
            EngineConfig(**{option: address})  # type: ignore[arg-type]
