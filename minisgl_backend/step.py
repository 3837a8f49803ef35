"""What scheduler and runner share: the plan of one step and its result. Plain integers in NumPy arrays.

A plan is born complete and never changes. Rank 0 makes it and every tensor-parallel rank executes it; the plan and
`StepDecisions` are all that a follower ever hears of a step.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, BoolArray, Float32Array, Int32Array, Int64Array
from minisgl_backend.request import PoolingParams, SamplingParams


class RowError(Exception):
    """What one row of a plan asks for cannot be prepared; the rest of the plan can."""

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.row = row


class Wants:
    """What a row asks of its chunk of a step: bits. Plain integers, since every chunk is asked several times, and an
    `IntFlag` takes a microsecond each time."""

    NOTHING: Final = 0
    TOKEN: Final = 1  # the next token, sampled from the last one's logits
    PROMPT_LOGPROBS: Final = 2  # of the chunk's tokens
    FIRST_STATE: Final = 4  # the hidden state of its first token
    LAST_STATE: Final = 8  # of its last token
    STATE_SUM: Final = 16  # the sum of those of all its tokens
    SCORES: Final = 32  # what the model's classification head makes of the last token's
    TOKEN_LOGPROBS: Final = 64  # of some tokens (AdmittedRow.pooling) as the next one
    POOLED: Final = FIRST_STATE | LAST_STATE | STATE_SUM | SCORES | TOKEN_LOGPROBS


class AdmittedRow(msgspec.Struct, frozen=True):
    """A sequence that takes a row with this step (first admission, or resumption after preemption).

    The runner resets everything that it keeps for the row: sampling parameters, penalty counts, history.
    """

    row: int
    uid: int
    params: SamplingParams  # `seed` is never None here
    prompt_len: int  # tokens of the client's prompt; what follows in token_ids was generated (resumption)
    token_ids: Int32Array  # all tokens so far, [num_tokens]; penalties and bad words need the cached ones too
    cached_len: int  # tokens whose keys and values are already in this row's pages
    pooling: PoolingParams | None = None  # not None: it samples nothing

    def asking_nothing(self) -> AdmittedRow:
        """The row with one token and no option."""
        params = SamplingParams(seed=0)
        return msgspec.structs.replace(
            self, params=params, prompt_len=1, token_ids=self.token_ids[:1], cached_len=0, pooling=None
        )


class PrefillChunk(msgspec.Struct, frozen=True):
    """Prompt tokens `start` to `start + len(token_ids)` of one row, to be computed in this step."""

    row: int
    start: int  # tokens of the sequence that are in the cache before this step
    token_ids: Int32Array  # [chunk_len]
    wants: int  # bits of Wants; TOKEN alone has a place in the step's sampled rows

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def samples(self) -> bool:
        """Its last token's logits are sampled."""
        return bool(self.wants & Wants.TOKEN)

    @property
    def pools(self) -> bool:
        """It is to give its part of a vector."""
        return bool(self.wants & Wants.POOLED)


class StepPlan(msgspec.Struct, frozen=True):
    """One step: a prefill part and a decode part, either of which may be empty.

    Row order is data: prefill chunks come first, then decode rows, both in the order given. The result lists
    the rows that sample in the same order.
    """

    step: int  # consecutive number
    admitted: tuple[AdmittedRow, ...]
    page_rows: Int32Array  # [num_new_pages]  new entries of the page table, to be written before the step runs:
    page_columns: Int32Array  # [num_new_pages]  page_table[page_groups, page_rows, page_columns] = page_ids
    page_ids: Int32Array  # [num_new_pages]  0, the padding page: what was there is out of all windows
    prefill: tuple[PrefillChunk, ...]
    # [num_decode]  A row with k drafts is 1 + k entries one after the other, at consecutive lengths.
    decode_rows: Int32Array
    decode_lengths: (
        Int32Array  # [num_decode]  tokens in the cache after this step; the input token's position is one less
    )
    decode_uids: Int64Array  # [num_decode]  for sampling noise and logs
    # [num_cleared]  pages to be set to zero before anything of the step is written: a sequence that failed has left
    # what may be NaN in them, and kernels may read a page beyond the end of the next one.
    cleared_pages: Int32Array = NO_INT32
    # [num_new_pages]  cache group of each new entry of the page table; [0] for a model of one group.
    page_groups: Int32Array = NO_INT32
    is_retry: bool = False  # an attempt at it has failed, which may have sampled and counted tokens
    # [num_decode]  the drafts that are verified: the input token of each entry, and -1 of a row's first, whose input is
    # its last token; [0] in a step without drafts.
    draft_tokens: Int32Array = NO_INT32
    # Not 0: a step of the proposer on the device, not of the model. So many tokens are proposed for each of the first
    # `num_proposing` decode entries, one of each row; the entries behind them, and `prefill`, are tokens that the
    # proposer has not seen.
    num_proposed: int = 0
    num_proposing: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model in this step."""
        return sum(len(chunk.token_ids) for chunk in self.prefill) + len(self.decode_rows)

    @property
    def sampled_rows(self) -> Int32Array:
        """Rows that sample a token in this step, in result order; int32 [num_sampled]."""
        if self.num_proposed:
            return NO_INT32
        first = np.array([chunk.row for chunk in self.prefill if chunk.samples], dtype=np.int32)
        return np.concatenate([first, self.decode_rows]) if len(first) else self.decode_rows

    def accepted(self, token_ids: Int32Array) -> BoolArray:
        """Which of the step's sampled tokens, int32 [num_sampled], count; bool [num_sampled].

        A draft is accepted where it is the token that was sampled at its position, and all before it are. What was
        sampled behind a wrong draft is no token of the sequence.
        """
        accepted = np.ones(len(token_ids), dtype=np.bool_)
        if not len(self.draft_tokens):
            return accepted
        drafts, sampled = self.draft_tokens, token_ids[len(token_ids) - len(self.draft_tokens) :]
        wrong = np.zeros(len(drafts), dtype=np.int32)
        wrong[1:] = (drafts[1:] >= 0) & (drafts[1:] != sampled[:-1])
        count, places = np.cumsum(wrong), np.arange(len(drafts))
        first = np.maximum.accumulate(np.where(drafts < 0, places, 0))
        accepted[len(token_ids) - len(drafts) :] = count == count[first]
        return accepted

    def without(self, rows: Container[int]) -> StepPlan:
        """The same step without the parts of these rows. Those of them that it admits ask for nothing then, so that
        nothing is left of what they asked."""
        kept = np.array([row not in rows for row in self.decode_rows.tolist()], dtype=np.bool_)
        return msgspec.structs.replace(
            self,
            admitted=tuple(one.asking_nothing() if one.row in rows else one for one in self.admitted),
            prefill=tuple(chunk for chunk in self.prefill if chunk.row not in rows),
            decode_rows=self.decode_rows[kept],
            decode_lengths=self.decode_lengths[kept],
            decode_uids=self.decode_uids[kept],
            draft_tokens=self.draft_tokens[kept] if len(self.draft_tokens) else self.draft_tokens,
            is_retry=True,
        )


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """Queue length above which the throughput of prefill outweighs the inter-token latency of running streams, and the
    budgets of a step then: the runner measures them, the scheduler plans by them."""

    waiting_tokens: int  # more of them in the queue are a backlog
    mixed_prefill_length: int  # prompt tokens of a step that also decodes, while there is one
    most_prefill_length: int  # and at most, in a queue so long that steps grow with it


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What steps took when the engine started, in seconds: the runner measures them, the scheduler plans by them."""

    prompts: tuple[tuple[int, float], ...]  # by prompt tokens, ascending from 0: steps in which one row decodes
    rows: tuple[tuple[int, float], ...]  # by rows that decode, ascending: steps without a prompt


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest:
    """Prompt tokens of one chunk whose log-probabilities a request asks for."""

    row: int
    first: int  # row of the step's hidden states that predicts the first of them
    position: int  # of the first of them in its sequence
    count: int
    top: int


class StepDecisions(msgspec.Struct, frozen=True):
    """What rank 0 decides about a step beyond its plan: all that says which collectives the step makes.

    It rests on more than the plan, such as grammars and the options of each row, and is made in one place
    (`BatchBuilder.build_host`). The other ranks do as it says and decide nothing, so that no rank ever waits in a
    collective that another does not make.
    """

    graph_size: int = 0  # decode batch of the captured graph to replay; 0: run eagerly
    resamples: bool = False  # sampled again after the graph, which samples by temperature alone
    # Which captured graph does so, see kernels.sampling.layout; 0: it is launched kernel by kernel.
    sampling_graph: int = 0
    prompt_logprobs: tuple[PromptLogprobsRequest, ...] = ()
    prompt_size: int = 0  # tokens of the captured pass that a lone prompt takes; 0: it takes none


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one position, after temperature 1 and before any truncation of the distribution."""

    token_id: int  # the token at that position
    logprob: float
    rank: int  # 1 for the most likely token
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class SequenceDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What few records of an answer have besides token and reason: from the scheduler to `LLM` and the fronts."""

    # With the first token of a request's first sequence:
    cached_tokens: int | None = None  # prompt tokens that the prefix cache supplied
    first_planned: float = 0.0  # when the first step with a token of it was planned, time.monotonic() seconds
    first_token: float = 0.0  # when that token was committed, likewise: with the arrival it gives the TTFT
    prompt_logprobs: tuple[Logprobs, ...] = ()  # of every prompt token but the first
    pooled: bytes = b""  # the vector that the prompt has become: float32, little-endian
    logprobs: Logprobs | None = None  # of the record's token
    # With the first record of a step with drafts: those that were verified for the sequence so far, and those of them
    # that were right
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str = ""  # with FinishReason.ERROR
    status: str = "INTERNAL"  # of the error, as errors.status_of names it


class StepResult(msgspec.Struct, frozen=True):
    """The tokens that one step sampled, in `StepPlan.sampled_rows` order."""

    step: int
    token_ids: Int32Array  # [num_sampled]
    logprobs: dict[int, Logprobs] = {}  # by index into token_ids; only where asked for
    prompt_logprobs: dict[int, list[Logprobs]] = {}  # by row: the chunk's positions
    # Rows whose sequence must end with FinishReason.ERROR: also those of chunks that do not end their prompt.
    failed_rows: frozenset[int] = frozenset()
    why: str = ""  # they failed, where not because of what the model computed
    executed: bool = True  # False: nothing of the plan has reached the device
    accepted: BoolArray | None = None  # [num_sampled]  which tokens count; None: all, as in a step without drafts
    pooled: dict[int, Float32Array] = {}  # by row: what its chunk was asked for; [width]
    proposed: Int32Array | None = None  # [num_proposing, num_proposed]  of a proposer's step


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Totals of speculation since start."""

    drafts: int = 0  # of a row in a step, whatever its length
    drafted: tuple[int, ...] = ()  # draft tokens, by their position in a draft
    accepted: tuple[int, ...] = ()  # those that were right, likewise

    def values(self) -> dict[str, float]:
        """By name: all together, and of each position, from 1 on."""
        found: dict[str, float] = {
            "total_drafts": self.drafts,
            "total_draft_tokens": sum(self.drafted),
            "total_accepted_draft_tokens": sum(self.accepted),
        }
        for name, counts in (("draft_tokens", self.drafted), ("accepted_draft_tokens", self.accepted)):
            found |= {f"total_{name}_{position}": count for position, count in enumerate(counts, start=1)}
        return found


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counters after one commit; the status line and Triton's metrics are made of these."""

    step: int
    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int  # on the free list
    pages_cached: int  # kept only by the prefix cache, evictable
    pages_leased: int  # held by sequences
    prefill_tokens: int  # computed in this step
    decode_tokens: int  # sampled in this step
    # totals since start
    total_prompt_tokens: int
    total_cached_tokens: int  # prompt tokens that the prefix cache supplied
    total_generated_tokens: int
    total_finished: int
    total_cancelled: int
    total_failed: int
    total_preempted: int
    speculation: DraftStats = DraftStats()
