"""The front between engine and senders: order, coalescing, credits, stop strings, one end for every request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.frontend import EngineFront
from minisgl_backend.delivery.responder import LATE, NO_TEXT
from minisgl_backend.delivery.send_queue import CONFIRM_S
from minisgl_backend.ipc.messages import CANCELLED, Rejected
from minisgl_backend.ipc.wire import Chunk, EngineRequest, OutputOptions
from minisgl_backend.request import FinishReason, Request, SamplingParams
from minisgl_backend.serving.tensors import DETAIL_OUTPUTS
from minisgl_backend.step import Logprobs, SequenceDetail
from minisgl_backend.text.vocabulary import Vocabulary
from tests.unit.delivery.fake_engine import FakeEngine, Recorder, anything

STOP, LENGTH = int(FinishReason.STOP), int(FinishReason.LENGTH)
METRICS = [name for name in (tensor.name for tensor in DETAIL_OUTPUTS) if name.endswith(("_ns", "_blocks", "_rate"))]
METRICS += ["num_cached_tokens", "total_draft_tokens", "total_accepted_draft_tokens"]


def letters() -> Vocabulary:
    """Token id n stands for the byte n."""
    table = [bytes([i]) for i in range(256)]
    return Vocabulary(lambda ids, skip: bytes(ids).decode("utf-8", "replace"), table, frozenset(), byte_exact=True)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[EngineFront]:
    found = EngineFront(EngineConfig(), letters(), front=0, socket_dir=tmp_path, probe=anything, make_client=FakeEngine)
    found.start()
    yield found
    found.close()


def ask(
    front: EngineFront,
    *,
    confirmed: bool = True,
    stream: bool = True,
    wanted: Sequence[str] = (),
    deadline: float | None = None,
    request_id: str = "",
    **params: Any,
) -> tuple[Recorder, int]:
    """`wanted`: fields of OutputOptions that are set."""
    sender = Recorder()
    options = OutputOptions(stream=stream, **dict.fromkeys(wanted, True))
    spec = EngineRequest(params=SamplingParams(**params), options=options, deadline=deadline, request_id=request_id)
    front.submit(sender, np.array([1, 2, 3], dtype=np.int32), spec, confirmed=confirmed)
    return sender, front.client.requests[-1].uid if front.client.requests else 0


def test_each_token_is_a_response_while_the_stream_keeps_up(front: EngineFront) -> None:
    sender, uid = ask(front)
    for number, token in enumerate(range(10, 20), start=1):
        front.client.give((uid, token, LENGTH if token == 19 else 0))
        sender.wait_chunks(number)
        front.client.confirm(uid, number)
    sender.wait_end()
    assert sender.tokens() == list(range(10, 20))
    assert [chunk.number for chunk in sender.chunks] == list(range(1, 11))
    assert [chunk.options is not None for chunk in sender.chunks] == [True] + [False] * 9
    assert [chunk.parts[0].is_last for chunk in sender.chunks] == [False] * 9 + [True]
    assert sender.details == [{}] * 10
    assert len(sender.threads) == 1


def test_a_stream_that_is_behind_gets_larger_chunks_and_loses_nothing(front: EngineFront) -> None:
    sender, uid = ask(front)
    others = [ask(front)[0] for _ in range(200)]  # little is left of the credits for each
    front.client.give((uid, 0, 0))
    sender.wait_chunks(1)
    for token in range(1, 100):
        front.client.give((uid, token, 0))
    time.sleep(0.1)
    assert len(sender.chunks) == 1
    front.client.confirm(uid, 1)
    sender.wait_chunks(2)
    assert sender.tokens() == list(range(100))
    front.client.give((uid, 100, STOP))  # the last one waits for no credit
    sender.wait_end()
    assert sender.tokens() == list(range(101))
    assert sender.chunks[-1].parts[0].ends_with_stop_token
    assert not any(other.ended for other in others)


def test_a_burst_is_confirmed_with_its_last_chunk(tmp_path: Path) -> None:
    front = EngineFront(
        EngineConfig(),
        letters(),
        front=0,
        socket_dir=tmp_path,
        probe=anything,
        num_workers=1,
        make_client=FakeEngine,
    )
    front.start()
    asked = [ask(front) for _ in range(8)]
    front.client.give(*((uid, 65, 0) for _, uid in asked))
    for sender, _ in asked:
        sender.wait_chunks(1)
    assert all(sender.chunks[0].confirm for sender, _ in asked)  # an end must know whether a stream has been seen
    time.sleep(2 * CONFIRM_S)  # a confirmation so soon after the last one would do for this burst
    with front.responder.sending[0]:  # the thread is with the first stream while the others line up
        for _, uid in asked:
            front.client.confirm(uid, 1)
        front.client.give(*((uid, 66, 0) for _, uid in asked))
    for sender, _ in asked:
        sender.wait_chunks(2)
    assert [sender.chunks[1].confirm for sender, _ in asked[1:]] == [False] * 6 + [True]
    front.client.give(*((uid, 67, LENGTH) for _, uid in asked))
    for sender, _ in asked:
        sender.wait_end()
        assert sender.chunks[-1].confirm
    front.close()


def test_a_stream_that_waits_for_a_confirmation_has_asked_for_it(front: EngineFront) -> None:
    senders = [ask(front) for _ in range(200)]
    for _ in range(2):
        front.client.give(*((uid, 65, 0) for _, uid in senders))
    for sender, _ in senders:
        sender.wait_chunks(1)
    time.sleep(0.1)
    assert [[chunk.confirm for chunk in sender.chunks] for sender, _ in senders] == [[True]] * 200


def test_a_whole_answer_is_one_response(front: EngineFront) -> None:
    sender, uid = ask(front, stream=False)
    for token in range(5):
        front.client.give((uid, token, 0))
    front.client.give((uid, 5, LENGTH))
    sender.wait_end()
    assert len(sender.chunks) == 1
    assert sender.tokens() == list(range(6))


def test_several_sequences_end_with_one_final_response(front: EngineFront) -> None:
    sender, uid = ask(front, n=3)
    front.client.give((uid + 2, ord("c"), LENGTH), (uid, ord("a"), LENGTH))
    sender.wait_chunks(2)
    assert not sender.ended
    front.client.give((uid + 1, ord("b"), LENGTH))
    sender.wait_end()
    assert {chunk.uid - uid: values(found)["sequence_index"] for chunk, found in sent(sender)} == {
        0: [0],
        1: [1],
        2: [2],
    }
    whole, uid = ask(front, n=3, stream=False, wanted=["finish_reason"])
    front.client.give((uid, 1, LENGTH), (uid + 1, 2, STOP), (uid + 2, 3, LENGTH))
    whole.wait_end()
    assert [part.token_ids[0] for part in whole.chunks[0].parts] == [1, 2, 3]
    assert values(whole.details[0]) == {"finish_reason": ["length", "stop", "length"]}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_stop_strings(front: EngineFront, stream: bool, include: bool) -> None:
    sender, uid = ask(front, stop=("END",), stream=stream, include_stop_str_in_output=include, wanted=["finish_reason"])
    for byte in b"one E two ENDED":
        front.client.give((uid, byte, 0))
    sender.wait_end()
    assert sender.text() == ("one E two END" if include else "one E two ")
    assert len(sender.tokens()) == len("one E two END")
    assert values(sender.details[-1]) == {"finish_reason": ["stop"]}
    assert front.client.aborted == [(uid, FinishReason.STOP)]


def test_text_held_for_a_stop_string_comes_at_the_end(front: EngineFront) -> None:
    sender, uid = ask(front, stop=("END",))
    for byte in b"xEN":
        front.client.give((uid, byte, 0))
    front.client.give((uid, ord("!"), LENGTH))
    sender.wait_end()
    assert sender.text() == "xEN!"
    sender, uid = ask(front, stop=("END",))
    front.client.give((uid, ord("E"), 0))
    front.client.give((uid, 2, STOP))
    sender.wait_end()
    assert sender.text() == "E"


def test_stop_strings_wait_for_min_tokens(front: EngineFront) -> None:
    sender, uid = ask(front, stop=("a",), min_tokens=3)
    for byte in b"aabba":
        front.client.give((uid, byte, 0))
    sender.wait_end()
    assert sender.text() == "aabb"


def test_failures_end_a_request_once(front: EngineFront) -> None:
    refused, uid = ask(front)
    front.client.on_rejected(Rejected(uid=uid, kind="CapacityError", message="queue is full"))
    refused.wait_end()
    assert refused.error == ("UNAVAILABLE", "queue is full")
    failed, uid = ask(front)
    front.client.give((uid, 5, 0))
    failed.wait_chunks(1)
    front.client.give((uid, -1, int(FinishReason.ERROR)), details={0: SequenceDetail(error="out of memory")})
    failed.wait_end()
    assert failed.error == ("INTERNAL", "out of memory")
    assert failed.chunks[-1].forget == (uid,)
    for detail, error in (
        ({}, ("INTERNAL", "the engine failed to compute the answer")),
        (
            {0: SequenceDetail(error="allowed: a simpler one", status="INVALID_ARG")},
            ("INVALID_ARG", "allowed: a simpler one"),
        ),
    ):
        failed, uid = ask(front)
        front.client.give((uid, -1, int(FinishReason.ERROR)), details=detail)
        failed.wait_end()
        assert failed.error == error
    cancelled, uid = ask(front)
    front.client.give((uid, -1, int(FinishReason.CANCELLED)))
    cancelled.wait_end()
    assert cancelled.error is not None
    assert cancelled.error[0] == "CANCELLED"
    assert front.num_streams == 0


def test_a_request_that_ends_before_its_first_chunk_is_confirmed(front: EngineFront) -> None:
    cancelled = int(FinishReason.CANCELLED)
    late, uid = ask(front, deadline=time.monotonic())
    front.client.give((uid, 65, 0))
    late.wait_chunks(1)
    front.client.give((uid, -1, cancelled))
    front.client.new_uid()  # the next stream is of the same sender thread, and comes after what it has to do by now
    other, other_uid = ask(front)
    front.client.give((other_uid, 66, 0))
    other.wait_chunks(1)
    assert not late.ended, "an error behind a chunk that is dropped would be dropped too"
    front.client.confirm(uid, 1)
    late.wait_end()
    assert late.error == ("CANCELLED", LATE)
    assert late.chunks[-1].forget == (uid,)
    unread, uid = ask(front)
    front.client.give((uid, 65, 0))
    unread.wait_chunks(1)
    front.client.give((uid, -1, cancelled))
    front.client.on_lost([uid])
    unread.wait_end()
    assert unread.error == ("INVALID_ARG", NO_TEXT)
    assert len(unread.chunks) == 1, "nobody would read another"


def test_one_failed_sequence_ends_its_siblings(front: EngineFront) -> None:
    sender, uid = ask(front, n=2)
    front.client.give((uid, -1, int(FinishReason.CANCELLED)))
    sender.wait_end()
    assert (uid + 1, FinishReason.CANCELLED) in front.client.aborted


def test_a_dead_engine_fails_all_and_takes_none(front: EngineFront) -> None:
    streams = [ask(front) for _ in range(5)]
    front.client.on_down([uid for _, uid in streams], "killed")
    for sender, _ in streams:
        sender.wait_end()
        assert sender.error is not None
        assert sender.error[0] == "UNAVAILABLE"
    front.client.dead = True
    late, _ = ask(front)
    late.wait_end()
    assert late.error == ("UNAVAILABLE", "the engine is not running")


def test_what_another_engine_core_computes_survives_a_death(front: EngineFront) -> None:
    (lost, lost_uid), (kept, kept_uid) = ask(front, n=2), ask(front)
    front.client.on_down([lost_uid + 1, 12345], "killed")
    lost.wait_end()
    assert lost.error == ("UNAVAILABLE", "killed")
    front.client.give((kept_uid, 70, 0), (kept_uid, 71, int(FinishReason.LENGTH)))
    kept.wait_end()
    assert kept.error is None
    assert kept.tokens() == [70, 71]


def test_a_client_that_left_an_unstreamed_request(front: EngineFront) -> None:
    sender, uid = ask(front, stream=False)
    sender.cancelled = True
    deadline = time.monotonic() + 30
    while not front.client.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert front.client.aborted[0] == (uid, FinishReason.CANCELLED)


def test_nothing_more_is_sent_to_a_client_that_left_but_the_end(front: EngineFront) -> None:
    sender, uid = ask(front, n=2)
    front.client.give((uid, 65, 0), (uid + 1, 66, 0))
    sender.wait_chunks(2)
    front.client.confirm(uid, CANCELLED)
    assert front.client.aborted == [(uid, FinishReason.CANCELLED), (uid + 1, FinishReason.CANCELLED)]
    front.client.give((uid, 67, 0), (uid + 1, 68, 0))
    other, other_uid = ask(front)
    front.client.give((other_uid, 69, 0))
    other.wait_chunks(1)
    assert len(sender.chunks) == 2
    cancelled = int(FinishReason.CANCELLED)
    front.client.give((uid, -1, cancelled), (uid + 1, -1, cancelled))
    sender.wait_end()
    assert sender.error is not None
    assert sender.error[0] == "CANCELLED"
    assert front.num_streams == 1


@pytest.mark.parametrize("apart", [True, False])
def test_a_cancelled_sequence_is_not_left_behind_by_an_acknowledged_sibling(front: EngineFront, apart: bool) -> None:
    """It has sent nothing itself: it comes once at its end, or its text may yet become a stop string."""
    if apart:
        sender, uid = ask(front, n=2, stream=False, wanted=["apart"])
    else:
        sender, uid = ask(front, n=2, stop=("AB",))
        front.client.give((uid, 65, 0))
    front.client.give((uid + 1, 90, LENGTH))
    sender.wait_chunks(1)
    front.client.give((uid, -1, int(FinishReason.CANCELLED)))
    time.sleep(0.1)
    assert not sender.ended, "whether its chunk was dropped is not known yet"
    front.client.confirm(uid + 1, 1)
    sender.wait_end()
    assert front.num_streams == 0


def test_a_client_that_left_is_no_reason_to_wait_for_acknowledgements(front: EngineFront) -> None:
    """The core's word comes first, then the word that the client has left, and no number with it."""
    sender, uid = ask(front)
    for number, token in enumerate((65, 66), start=1):
        front.client.give((uid, token, 0))
        sender.wait_chunks(number)
    front.client.give((uid, -1, int(FinishReason.CANCELLED)))
    time.sleep(0.1)
    assert not sender.ended
    front.client.confirm(uid, -1)
    sender.wait_end()
    assert front.num_streams == 0


def test_a_silent_detokenizer_is_probed(tmp_path: Path) -> None:
    probes: list[int] = []
    front = EngineFront(
        EngineConfig(),
        letters(),
        front=0,
        socket_dir=tmp_path,
        probe=lambda chunk: probes.append(chunk.uid),
        make_client=FakeEngine,
    )
    front.start()
    sender, uid = ask(front)
    front.client.give((uid, 65, 0))
    sender.wait_chunks(1)
    deadline = time.monotonic() + 30
    while not probes and time.monotonic() < deadline:
        time.sleep(0.01)
    front.credits.acknowledge(probes, [1] * len(probes), time.monotonic())
    gone: list[int] = []
    while not gone and time.monotonic() < deadline:
        time.sleep(0.01)
        gone = front.credits.expire(time.monotonic())
    assert gone == [uid]
    front.close()


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_comes_where_stop_strings_do(front: EngineFront, include: bool) -> None:
    sender, uid = ask(front, include_stop_str_in_output=include)
    front.client.give((uid, 65, STOP))
    sender.wait_end()
    assert sender.chunks[-1].parts[0].ends_with_stop_token != include
    sender, uid = ask(front, include_stop_str_in_output=include, stop=("zz",))
    front.client.give((uid, 65, 0), (uid, 66, STOP))
    sender.wait_end()
    assert sender.text() == ("AB" if include else "A")


def test_everything_that_can_be_asked_beside_the_text(front: EngineFront) -> None:
    wanted = ["finish_reason", "num_input_tokens", "num_output_tokens", "cumulative_logprob", "logprobs", "log_probs"]
    sender, uid = ask(front, logprobs=1, wanted=[*wanted, "prompt_logprobs", "perf_metrics"])
    now = time.monotonic()
    for number, token in enumerate(b"AB", start=1):
        entry = Logprobs(token_id=token, logprob=-0.25, rank=2, top_ids=(token + 1,), top=(-0.125,))
        times = {"first_token": now, "first_planned": now - 2.0} if number == 1 else {}
        detail = SequenceDetail(logprobs=entry, **times)
        if number == 2:
            detail = msgspec.structs.replace(detail, draft_tokens=8, accepted_draft_tokens=6)
        front.client.give((uid, token, LENGTH if number == 2 else 0), details={0: detail})
        sender.wait_chunks(number)
    sender.wait_end()
    first, last = (values(found) for found in sender.details)
    logprobs = [json.loads(found.pop("logprobs")[0]) for found in (first, last)]
    assert logprobs == [
        [
            {
                str(token + 1): {"logprob": -0.125, "rank": 1, "decoded_token": chr(token + 1)},
                str(token): {"logprob": -0.25, "rank": 2, "decoded_token": chr(token)},
            }
        ]
        for token in b"AB"
    ]
    counts = {"num_input_tokens": [3], "num_output_tokens": [1]}
    # NVIDIA's client reads the figures of every response.
    figures = [{name: found.pop(name)[0] for name in METRICS} for found in (first, last)]
    assert figures[0]["first_scheduled_time_ns"] == figures[1]["first_scheduled_time_ns"]
    assert figures[0]["first_token_time_ns"] == figures[1]["first_token_time_ns"]
    assert figures[0]["first_token_time_ns"] - figures[0]["first_scheduled_time_ns"] == pytest.approx(2e9, rel=0.2)
    assert figures[0]["last_token_time_ns"] <= figures[1]["last_token_time_ns"]
    assert [found["kv_cache_alloc_total_blocks"] for found in figures] == [1, 1]
    drafts = ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")
    assert [[found[name] for name in drafts] for found in figures] == [[0, 0, 0], [8, 6, 0.75]]
    assert first == {
        **counts,
        "finish_reason": ["None"],
        "cumulative_logprob": [-0.25],
        "cum_log_probs": [-0.25],
        "output_log_probs": [-0.25],
        "prompt_logprobs": ["null"],
    }
    expected = {
        **counts,
        "finish_reason": ["length"],
        "cumulative_logprob": [-0.5],
        "output_log_probs": [-0.25, -0.25],
    }
    assert {name: last.get(name) for name in expected} == expected
    assert "prompt_logprobs" not in last


@pytest.mark.parametrize("stream", [False, True])
def test_the_values_of_a_prompt_come_once_however_many_sequences_it_has(front: EngineFront, stream: bool) -> None:
    sender, uid = ask(front, stream=stream, n=3, prompt_logprobs=1, wanted=["prompt_logprobs"])
    entries = [Logprobs(token_id=65, logprob=-0.5, rank=2, top_ids=(66,), top=(-0.25,)) for _ in range(2)]
    detail = SequenceDetail(cached_tokens=0, prompt_logprobs=tuple(entries))
    front.client.give((uid, 65, 0), (uid + 1, 65, 0), (uid + 2, 65, 0), details={0: detail})
    front.client.give((uid, 66, LENGTH), (uid + 1, 66, LENGTH), (uid + 2, 66, LENGTH))
    sender.wait_end()
    told = [json.loads(found["prompt_logprobs"].item()) for found in sender.details if "prompt_logprobs" in found]
    position = {
        "66": {"logprob": -0.25, "rank": 1, "decoded_token": "B"},
        "65": {"logprob": -0.5, "rank": 2, "decoded_token": "A"},
    }
    assert told == [[position, position]]


def test_the_figures_of_a_request_may_come_once(front: EngineFront) -> None:
    sender, uid = ask(front, wanted=["final_perf_metrics"])
    front.client.give((uid, 65, 0))
    sender.wait_chunks(1)
    front.client.give((uid, 66, LENGTH))
    sender.wait_end()
    assert sender.details[0] == {}
    assert set(METRICS) <= set(sender.details[-1])


def test_each_sequence_is_a_response_of_its_own_where_that_is_asked(front: EngineFront) -> None:
    sender, uid = ask(front, stream=False, n=2, wanted=["apart"])
    front.client.give((uid, 65, 0), (uid + 1, 66, LENGTH))
    sender.wait_chunks(1)
    assert not sender.ended
    front.client.give((uid, 67, LENGTH))
    sender.wait_end()
    found = [values(details) for details in sender.details]
    assert found == [{"sequence_index": [index], "batch_index": [0]} for index in (1, 0)]
    assert [len(chunk.parts) for chunk in sender.chunks] == [1, 1]
    assert all(chunk.options is not None for chunk in sender.chunks)
    assert sender.tokens() == [66, 65, 67]


def test_token_ids_come_with_their_number(front: EngineFront) -> None:
    sender, uid = ask(front, wanted=["token_ids", "apart"])
    front.client.give((uid, 65, 0))
    sender.wait_chunks(1)
    front.client.give((uid, 66, 0), (uid, 67, LENGTH))
    sender.wait_end()
    lengths = [values(details)["sequence_length"][0] for details in sender.details]
    assert sum(lengths) == 3
    assert all(chunk.token_ids for chunk in sender.chunks)


def test_a_stop_request_ends_what_runs_under_its_id(front: EngineFront) -> None:
    _, first = ask(front, request_id="mine", n=2)
    ask(front, request_id="other")
    ask(front)
    front.stop_requests("mine")
    assert front.client.aborted == [(first, STOP), (first + 1, STOP)]


def test_log_probabilities_without_a_number_are_null(front: EngineFront) -> None:
    sender, uid = ask(front, stream=False, logprobs=0, wanted=["logprobs", "null_logprobs", "cumulative_logprob"])
    entry = Logprobs(token_id=65, logprob=-0.5, rank=1, top_ids=(), top=())
    front.client.give((uid, 65, LENGTH), details={0: SequenceDetail(logprobs=entry)})
    sender.wait_end()
    assert values(sender.details[0]) == {"logprobs": ["null"], "cumulative_logprob": [-0.5]}


def values(arrays: dict[str, Any]) -> dict[str, list[Any]]:
    """What the output tensors hold; the first dimension of each is that of the batch."""
    assert all(array.shape[0] == 1 for array in arrays.values())
    flat = {name: array.reshape(-1).tolist() for name, array in arrays.items()}
    return {name: [_text(item) for item in found] for name, found in flat.items()}


def _text(item: Any) -> Any:
    return item.decode() if isinstance(item, bytes) else item


def sent(sender: Recorder) -> Iterable[tuple[Any, dict[str, Any]]]:
    return zip(sender.chunks, sender.details, strict=True)


def test_closing_ends_what_is_left(tmp_path: Path) -> None:
    front = EngineFront(EngineConfig(), letters(), front=0, socket_dir=tmp_path, probe=anything, make_client=FakeEngine)
    front.start()
    sender, _ = ask(front)
    front.close()
    assert sender.error is not None
    assert sender.error[0] == "UNAVAILABLE"


def test_a_request_that_fails_on_its_way_to_the_core_is_aborted_behind_it(front: EngineFront) -> None:
    """Its first abort may overtake it: the core would know nothing of that, and compute for nobody."""
    engine, submit = front.client, front.client.submit

    def overtaken(request: Request) -> None:
        engine.on_down([request.uid], "a core is gone")  # told by another thread, in between
        sender.wait_end()
        submit(request)
        engine.aborted.clear()

    engine.submit = overtaken
    sender = Recorder()
    spec = EngineRequest(params=SamplingParams(n=2), options=OutputOptions(stream=True))
    front.submit(sender, np.array([1], dtype=np.int32), spec, confirmed=True)
    uid = engine.requests[-1].uid
    assert engine.aborted == [(uid, FinishReason.CANCELLED), (uid + 1, FinishReason.CANCELLED)]


class Refusing(Recorder):
    """A sender whose first responses, or errors, do not get through."""

    def __init__(self, sends: int, errors: int = 0) -> None:
        super().__init__()
        self._sends, self._errors = sends, errors
        self.asked = threading.Event()

    def send(self, chunk: Chunk, details: Arrays, final: bool) -> None:
        if self._sends:
            self._sends -= 1
            raise RuntimeError("Failed to increase the shared memory pool size")
        super().send(chunk, details, final)

    def fail(self, status: str, message: str) -> None:
        self.asked.set()
        if self._errors:
            self._errors -= 1
            raise RuntimeError("Failed to increase the shared memory pool size")
        super().fail(status, message)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_cannot_be_sent_ends_with_an_error_and_leaves_nothing(front: EngineFront, stream: bool) -> None:
    sender = Refusing(sends=1)
    spec = EngineRequest(params=SamplingParams(), options=OutputOptions(stream=stream))
    front.submit(sender, np.array([1], dtype=np.int32), spec, confirmed=True)
    front.client.give((front.client.requests[-1].uid, 65, LENGTH))
    sender.wait_end()
    assert sender.error == (
        "INTERNAL",
        "the answer could not be sent: Failed to increase the shared memory pool size",
    )
    assert front.num_streams == 0


def test_who_cannot_be_answered_at_all_holds_up_nobody(front: EngineFront) -> None:
    lost = [Refusing(sends=2, errors=1) for _ in range(4)]
    spec = EngineRequest(params=SamplingParams(), options=OutputOptions(stream=True))
    for sender in lost:
        front.submit(sender, np.array([1], dtype=np.int32), spec, confirmed=True)
        front.client.give((front.client.requests[-1].uid, 65, 0))
    assert all(sender.asked.wait(30) for sender in lost)
    others = [ask(front) for _ in range(4)]
    front.client.give(*((uid, 65, LENGTH) for _, uid in others))
    for sender, _ in others:
        sender.wait_end()
        assert sender.error is None
    assert front.num_streams == 0


def test_answered_requests_are_measured(front: EngineFront) -> None:
    latency = front.responder.latency
    sender, uid = ask(front)
    front.client.give((uid, 65, 0), details={0: SequenceDetail(first_token=1.0, first_planned=time.monotonic() + 20.0)})
    sender.wait_chunks(1)
    front.client.give((uid, 66, LENGTH))
    sender.wait_end()
    failed, uid = ask(front, deadline=time.monotonic() - 1.0)
    front.client.give((uid, -1, int(FinishReason.CANCELLED)))
    failed.wait_end()
    whole, first = ask(front, stream=False, n=2)
    front.client.give((first, 65, LENGTH), (first + 1, 66, LENGTH))
    whole.wait_end()
    assert [sum(one.counts) for one in (latency.queued, latency.whole, latency.prompt_tokens)] == [2, 2, 2]
    assert (latency.prompt_tokens.sum, latency.generated_tokens.sum) == (6, 4)
    assert sum(latency.generated_tokens.counts) == 3, "each sequence is an answer"
    assert latency.queued.sum == pytest.approx(20.0, rel=0.2)
    assert 0 < latency.whole.sum < 20
