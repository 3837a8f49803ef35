"""The interface between scheduler and runner: the plan of one step and its result. Plain integers in NumPy arrays.

A plan is complete when it is created and never changes. Rank 0 makes it and every tensor-parallel rank executes it; the
plan and `StepDecisions` are all that a follower gets of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, BoolArray, Float32Array, Int32Array, Int64Array
from minisgl_backend.request import Content, PoolingParams, SamplingParams


class RowError(Exception):
    """A row of a plan cannot be prepared; the rest of the plan can."""

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.row = row


class Wants:
    """The outputs that a row needs of its chunk, as bits. Plain integers, since every chunk is checked several times
    and an `IntFlag` takes a microsecond each time."""

    NOTHING: Final = 0
    TOKEN: Final = 1  # the next token, sampled from the last one's logits
    PROMPT_LOGPROBS: Final = 2  # of the chunk's tokens
    FIRST_STATE: Final = 4  # the hidden state of its first token
    LAST_STATE: Final = 8  # of its last token
    STATE_SUM: Final = 16  # the sum of those of all its tokens
    SCORES: Final = 32  # the classification head's output for the last token
    TOKEN_LOGPROBS: Final = 64  # of some tokens (AdmittedRow.pooling) as the next one
    POOLED: Final = FIRST_STATE | LAST_STATE | STATE_SUM | SCORES | TOKEN_LOGPROBS


def vectors_key(content: Content, cache_salt: str | None) -> bytes:
    """By which an image's vectors are kept, 16 bytes: requests with different salts share none."""
    salt = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest() if cache_salt else b""
    return hashlib.blake2b(content.digest, digest_size=16, salt=salt, person=b"minisgl vectors").digest()


class EncodeSlice(msgspec.Struct, frozen=True, array_like=True):
    """Some units of the encoder's work for one image, of `EncoderLimits.num_units`: parts of layers, one behind the
    other. Slices of an image follow one another, over several steps."""

    row: int  # whose request asks for it
    key: bytes  # of the vectors
    content: Content
    first: int  # unit; 0: with what comes before the layers
    last: int  # the one behind the slice; all of them: with what comes behind the layers
    rank: int = 0  # the tensor-parallel rank that computes it


class AdmittedRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a row with this step (first admission, or resumption after preemption).

    The runner resets all state of the row: sampling parameters, penalty counts, history.
    """

    row: int
    uid: int
    params: SamplingParams  # its `seed` is never None
    prompt_len: int  # tokens of the client's prompt; later ones in token_ids were generated (resumption)
    token_ids: Int32Array  # all tokens so far, [num_tokens]; penalties and bad words need the cached ones too
    cached_len: int  # tokens whose keys and values are already in this row's pages
    pooling: PoolingParams | None = None  # not None: it samples nothing
    # Of a model with states (0 without): the slot that holds the state after `cached_len` tokens, read by the row's
    # first chunk; 0: there is none, it starts from zeros. And the row's own slot, which its chunks write.
    state_source: int = 0
    state_slot: int = 0
    contents: tuple[Content, ...] = ()  # images in its prompt
    adapter: int = 0  # the slot of its adapter; 0: it has none

    def asking_nothing(self) -> AdmittedRow:
        """The row with one token and no options."""
        params = SamplingParams(seed=0)
        return msgspec.structs.replace(
            self,
            params=params,
            prompt_len=1,
            token_ids=self.token_ids[:1],
            cached_len=0,
            pooling=None,
            contents=(),
            adapter=0,
        )


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens `start` to `start + len(token_ids)` of one row, to be computed in this step."""

    row: int
    start: int  # tokens of the sequence that are cached before this step
    token_ids: Int32Array  # [chunk_len]
    wants: int  # bits of Wants; only TOKEN makes the row one of the step's sampled rows
    # States to keep on the way, of a model with states: (tokens of the sequence, a multiple of a page, within the
    # chunk; the slot that the state after them is written to), ascending.
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def samples(self) -> bool:
        """Its last token's logits are sampled."""
        return bool(self.wants & Wants.TOKEN)

    @property
    def pools(self) -> bool:
        """It outputs its part of a vector."""
        return bool(self.wants & Wants.POOLED)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: a prefill part and a decode part, either of which may be empty.

    Row order is data: prefill chunks come first, then decode rows, both in the order given. The result lists
    the rows that sample in the same order.
    """

    step: int  # consecutive number
    admitted: tuple[AdmittedRow, ...]
    page_rows: Int32Array  # [num_new_pages]  new entries of the page table, to be written before the step runs:
    page_columns: Int32Array  # [num_new_pages]  page_table[page_groups, page_rows, page_columns] = page_ids
    page_ids: Int32Array  # [num_new_pages]  0, the padding page: the earlier page is out of all windows
    prefill: tuple[PrefillChunk, ...]
    # [num_decode]  A row with k drafts has 1 + k consecutive entries, of consecutive lengths.
    decode_rows: Int32Array
    decode_lengths: (
        Int32Array  # [num_decode]  tokens in the cache after this step; the input token's position is one less
    )
    decode_uids: Int64Array  # [num_decode]  for sampling noise and logs
    # [num_cleared]  pages to be set to zero before the step writes anything: a failed sequence may have left NaN in
    # them, and kernels may read a page beyond the end of its next sequence.
    cleared_pages: Int32Array = NO_INT32
    # [num_new_pages]  which of a column's pages each new entry is (`kv.groups`): its cache group, where groups have one
    # each; [0] for a model with one page a column.
    page_groups: Int32Array = NO_INT32
    is_retry: bool = False  # an earlier attempt failed, which may have sampled and counted tokens
    # [num_decode]  the drafts to verify: each entry's input token, and -1 for a row's first entry, whose input is its
    # last token; [0] in a step without drafts.
    draft_tokens: Int32Array = NO_INT32
    # Not 0: a step of the device proposer instead of the model. That many tokens are proposed for each of the first
    # `num_proposing` decode entries, one per row; the entries after them, and `prefill`, are tokens that the proposer's
    # layers have not computed yet.
    num_proposed: int = 0
    num_proposing: int = 0
    # [num_folds]  of a model with states: rows whose state moves on to a later page border before this step's forward
    # pass. The state in slot `fold_sources` takes in the row's tokens up to `fold_borders` (tokens of the sequence, a
    # multiple of a page) and is written to slot `fold_targets`, the row's own from now on. Not repeated in a retry.
    fold_rows: Int32Array = NO_INT32
    fold_sources: Int32Array = NO_INT32
    fold_targets: Int32Array = NO_INT32
    fold_borders: Int32Array = NO_INT32
    freed_vectors: tuple[bytes, ...] = ()  # keys of images whose vectors, or begun ones, are dropped before `encode`
    encode: tuple[EncodeSlice, ...] = ()  # before the model
    # Slots that are filled before anything else, and the numbers of the adapters that they get.
    adapter_loads: tuple[tuple[int, int], ...] = ()

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

        A draft is accepted if it equals the token sampled at its position and all drafts before it were accepted. A
        token sampled after a rejected draft is not part of the sequence.
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
        """The same step without the parts of these rows. Rows among them that it admits get no options, so that the
        runner keeps none of theirs."""
        kept = np.array([row not in rows for row in self.decode_rows.tolist()], dtype=np.bool_)
        return msgspec.structs.replace(
            self,
            admitted=tuple(one.asking_nothing() if one.row in rows else one for one in self.admitted),
            prefill=tuple(chunk for chunk in self.prefill if chunk.row not in rows),
            decode_rows=self.decode_rows[kept],
            decode_lengths=self.decode_lengths[kept],
            decode_uids=self.decode_uids[kept],
            draft_tokens=self.draft_tokens[kept] if len(self.draft_tokens) else self.draft_tokens,
            encode=tuple(one for one in self.encode if one.row not in rows),
            is_retry=True,
        )


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """Queue length above which prefill throughput outweighs the inter-token latency of running streams, and the prompt
    budgets of a step then. Measured by the runner, used by the scheduler."""

    waiting_tokens: int  # more waiting tokens than this are a backlog
    mixed_prefill_length: int  # prompt tokens of a step that also decodes, during a backlog
    most_prefill_length: int  # upper limit, for queues so long that the budget grows with them


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times in seconds, measured by the runner when the engine started, used by the scheduler."""

    prompts: tuple[tuple[int, float], ...]  # by prompt tokens, ascending from 0: steps in which one row decodes
    rows: tuple[tuple[int, float], ...]  # by decoding rows, ascending: steps without a prompt
    # Of a layer of the encoder, by the number of parts that a call computes, from one on: seconds, and seconds more for
    # each patch that one attends to. (): not measured.
    encoder: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest:
    """Prompt tokens of one chunk whose log-probabilities are requested."""

    row: int
    first: int  # row of the step's hidden states that predicts the first of them
    position: int  # of the first of them in its sequence
    count: int
    top: int


class StepDecisions(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's decisions about a step in addition to its plan: all that determines the step's collectives.

    They depend on more than the plan, such as grammars and each row's options, and are made in one function
    (`BatchBuilder.build_host`). The other ranks follow them, so that no rank ever waits in a collective that another
    one does not enter.
    """

    graph_size: int = 0  # decode batch of the captured graph to replay; 0: run eagerly
    resamples: bool = False  # sample again after the graph, which samples by temperature only
    # The captured graph for that, see kernels.sampling.layout; 0: launched kernel by kernel.
    sampling_graph: int = 0
    prompt_logprobs: tuple[PromptLogprobsRequest, ...] = ()
    prompt_size: int = 0  # size of the captured pass for a single prompt; 0: none
    adapts: bool = False  # a row of the step has an adapter


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one position, after temperature 1 and before any truncation of the distribution."""

    token_id: int  # the token at that position
    logprob: float
    rank: int  # 1 for the most likely token
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class SequenceDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Details that few records of an answer have besides token and reason: from the scheduler to `LLM` and the
    fronts."""

    # With the first token of a request's first sequence:
    cached_tokens: int | None = None  # prompt tokens that the prefix cache supplied
    first_planned: float = 0.0  # when its first step was planned, time.monotonic() seconds
    first_token: float = 0.0  # when that token was committed; minus the arrival it is the TTFT
    prompt_logprobs: tuple[Logprobs, ...] = ()  # for every prompt token but the first
    pooled: bytes = b""  # the prompt's vector: float32, little-endian
    logprobs: Logprobs | None = None  # of the record's token
    # With the first record of a step with drafts: drafts verified for the sequence so far, and accepted ones
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    error: str = ""  # with FinishReason.ERROR
    status: str = "INTERNAL"  # of the error, as errors.status_of names it


class StepResult(msgspec.Struct, frozen=True):
    """The tokens that one step sampled, in `StepPlan.sampled_rows` order."""

    step: int
    token_ids: Int32Array  # [num_sampled]
    logprobs: dict[int, Logprobs] = {}  # by index into token_ids; only if requested
    prompt_logprobs: dict[int, list[Logprobs]] = {}  # by row: the chunk's positions
    # Rows whose sequence must end with FinishReason.ERROR: also those of chunks that do not end their prompt.
    failed_rows: frozenset[int] = frozenset()
    why: str = ""  # the reason, if it is not the model's output
    executed: bool = True  # False: nothing of the plan has reached the device
    accepted: BoolArray | None = None  # [num_sampled]  which tokens count; None: all, as in a step without drafts
    pooled: dict[int, Float32Array] = {}  # by row: its chunk's pooling output; [width]
    proposed: Int32Array | None = None  # [num_proposing, num_proposed]  of a proposer's step


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Totals of speculation since start."""

    drafts: int = 0  # one per row and step, whatever its length
    drafted: tuple[int, ...] = ()  # draft tokens by position in the draft
    accepted: tuple[int, ...] = ()  # accepted ones by position

    def values(self) -> dict[str, float]:
        """By name: totals, and per position from 1 on."""
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
    """Counters after one commit, the source of the status line and of Triton's metrics."""

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
    # of a model with states
    states_total: int = 0  # slots
    states_free: int = 0
    states_cached: int = 0  # kept only by the prefix cache, evictable
    states_owned: int = 0  # held by sequences
    total_state_misses: int = 0  # prompt tokens that the prefix cache had pages of, but no state behind them
    # where adapters are served
    adapter_slots: int = 0
    adapters_open: int = 0  # that have a slot
    adapters_waiting: int = 0  # whose requests wait for one
    total_adapter_loads: int = 0  # into slots
    # of a model that sees
    encoder_cache_bytes: int = 0  # for vectors
    encoder_used_bytes: int = 0  # by images that are held or being encoded
    total_encoder_hits: int = 0  # images of prompts whose vectors were held
    total_encoder_misses: int = 0  # that had to be encoded
    total_encoder_evictions: int = 0
    total_encoder_patches: int = 0  # encoded
    total_image_tokens: int = 0  # prompt tokens of started sequences that are images'
    speculation: DraftStats = DraftStats()
