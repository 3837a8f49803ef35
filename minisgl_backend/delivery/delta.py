"""What a stream sends, and where to: the news of its sequences, and metrics beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.ipc.wire import Chunk, Part
from minisgl_backend.step import Logprobs


class Sender(Protocol):
    """Where the responses of one request go. `send` with `final`, or `fail`, ends it: one of the two, once."""

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
    image_tokens: int  # prompt tokens that are images'
    reused_pages: int
    total_pages: int
    draft_tokens: int  # verified for its sequences
    accepted_draft_tokens: int  # accepted ones of them


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The news of one sequence: `part` becomes text, the other fields are facts that go with it."""

    part: Part
    num_tokens: int
    reason: int  # FinishReason; 0: the sequence goes on
    index: int  # of the sequence, with n > 1
    logprobs: tuple[Logprobs, ...]
    cumulative_logprob: float  # of the sequence so far


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one sequence, in order, merged into one."""
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
