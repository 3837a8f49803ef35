"""Messages between fronts, detokenizer and engine core: typed structs, packed with msgspec (MessagePack).

Nothing here is ever pickled.

    front -> core         Hello, Submit, Abort, GetStats, AdapterCommand    (Command)
    core  -> front        Welcome, Outputs, Rejected, Stats, Done, Failed   (Event)
    detokenizer -> front  Ack                                   (of one chunk or several)
    core -> its parent    StartReport                               (once, on a pipe)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl_backend.request import Request
from minisgl_backend.step import SequenceDetail

CANCELLED = -1  # in an `Ack`, instead of a chunk number: the stream's client has left


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front attaches. Its index is the bits above the lowest 47 of all its uids (see `uid_of`)."""

    front: int
    pid: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Compute this request. Answered by Outputs, or by one Rejected."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these sequences; unknown uids are ignored. `reason` is a FinishReason (STOP for a stop string).

    Each of them still gets its last record, with that reason.
    """

    uids: tuple[int, ...]
    reason: int
    found_at: float = 0.0  # when their client was found to have left, time.monotonic() seconds; 0: it has not


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for one Stats event to this front."""

    front: int


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter on all ranks. Like each AdapterCommand it is answered once, by Done or Failed with its id, when
    every rank has done it; ids are the front's. Done has the adapter's digest, in hex."""

    front: int
    id: int
    folder: str


class ServeAdapter(msgspec.Struct, frozen=True, tag=True):
    """A name stands for what a ReadAdapter of this front has read, from the next request on. A core that has started
    since then reads it when a request names it."""

    front: int
    id: int
    read: int  # id of that command
    name: str
    folder: str  # that was read
    digest: str  # and the answer


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget what a ReadAdapter of this front has read, or reads."""

    front: int
    id: int
    read: int  # id of that command


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """No request may name it from now on. Those that have done so end with it."""

    front: int
    id: int
    name: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """A command was carried out."""

    id: int
    result: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A command was not carried out, and has changed nothing."""

    id: int
    kind: str  # of `errors`: "ConfigError", "CapacityError" or "InvalidRequestError"
    message: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The core is ready; facts that fronts need."""

    pid: int
    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    description: str  # model, backends, dtype: for logs


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The records of one step for one front: parallel little-endian arrays, one entry per sequence.

    A record without a token (an aborted sequence's last one) has token id -1. Several Outputs are merged by
    concatenation, in order; `details` is keyed by entry index.
    """

    uids: bytes  # int64 [n]
    token_ids: bytes  # int32 [n]
    reasons: bytes  # uint8 [n], FinishReason; 0: the sequence goes on
    details: dict[int, SequenceDetail] = {}


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request that the core cannot take: `kind` names the error class of `errors` to raise.

    Nothing comes for its sequences, uids `uid` to `uid + count - 1`.
    """

    uid: int
    kind: str  # "InvalidRequestError" or "CapacityError"
    message: str
    count: int = 1


class HistogramCounts(msgspec.Struct, frozen=True):
    """Observations since the start."""

    counts: tuple[int, ...]  # by upper bound; the last one is for values above all bounds
    sum: float


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters and gauges by name (the fields of step.StepStats and those of the core), and the core's histograms."""

    values: dict[str, float]
    histograms: dict[str, HistogramCounts] = {}
    tenants: dict[str, dict[str, float]] = {}  # fields of fairness.TenantStats, by name; {} without fair shares
    adapters: dict[str, dict[str, int]] = {}  # fields of scheduler's AdapterStats, by name


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer has handled responses: for each uid the highest sequence number seen, in order.

    Number -1 (CANCELLED): the stream's client has left.
    """

    uids: bytes  # int64 [n]
    sequence_numbers: bytes  # int32 [n]
    found_at: float = 0.0  # when that was found, time.monotonic() seconds


class StartReport(msgspec.Struct, frozen=True):
    """The only message of a core's process to the front that started it, as a line of JSON on a pipe."""

    kind: Literal["ready", "ConfigError", "failed"]
    message: str = ""


AdapterCommand = ReadAdapter | ServeAdapter | DropAdapter | UnloadAdapter
Command = Hello | Submit | Abort | GetStats | AdapterCommand
Event = Welcome | Outputs | Rejected | Stats | Done | Failed


def uid_of(front: int, counter: int) -> int:
    """A uid that no other front uses: 16 bits of front index, 47 bits of counter."""
    return (front << 47) | counter


def front_of(uid: int) -> int:
    """The index of the front that created this uid."""
    return uid >> 47
