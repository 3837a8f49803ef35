"""Images' share of a step: which layers of the encoder it computes for which image, and how far a chunk gets.

A chunk runs only as far as the vectors that it needs are there, or are made by the same step, before the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_backend.cache.encoder_books import EncoderBooks
from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Content
from minisgl_backend.scheduler.encoder_costs import EncoderCosts
from minisgl_backend.scheduler.image_share import ImageShare
from minisgl_backend.scheduler.sequence import Sequence
from minisgl_backend.scheduler.step_estimate import StepEstimate
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.step import EncodeSlice, StepPlan, vectors_key


@dataclass(frozen=True, slots=True)
class _Passed:
    """A row's tokens of an image are computed, once `step` is committed."""

    step: int
    key: bytes
    uid: int


class ImageBudget:
    """Owns the encoder's books. Costs are in prompt tokens, as budgets are."""

    def __init__(self, limits: EncoderLimits, estimate: StepEstimate | None = None, multiple: int = 1) -> None:
        """estimate: of `MeasuredSteps`; multiple: `SchedulerLimits.chunk_multiple`; the cache holds all images within
        as many tokens."""
        self.limits, self.share = limits, ImageShare(estimate, multiple, limits.context_cost)
        self._costs = EncoderCosts(limits, self.share.encoder_calls())
        self._multiple = multiple
        self.books = EncoderBooks(limits.capacity, limits.num_ranks)
        self._passed: list[_Passed] = []
        self._patches = self._tokens = 0  # since the start: encoded, and of started prompts

    def stats(self) -> dict[str, int]:
        """By the names of `StepStats`."""
        books = self.books
        return {
            "encoder_cache_bytes": books.capacity,
            "encoder_used_bytes": books.used,
            "total_encoder_hits": books.hits,
            "total_encoder_misses": books.misses,
            "total_encoder_evictions": books.evictions,
            "total_encoder_patches": self._patches,
            "total_image_tokens": self._tokens,
        }

    def note_start(self, sequence: Sequence) -> None:
        """Its prompt counts from now on."""
        self._tokens += sum(content.length for content in sequence.contents)

    def check_request(self, contents: tuple[Content, ...]) -> None:
        """Raises InvalidRequestError for an image whose vectors can never be kept, beside those that a chunk needs with
        them."""
        last, together = -1, 0
        for number, content in enumerate(contents, start=1):
            needed = content.num_vectors * self.limits.vector_bytes
            together = needed + (together if self._multiple > 1 and content.start // self._multiple == last else 0)
            last = (content.end - 1) // self._multiple
            if together > self.limits.capacity:
                beside = " with those of images just before it" if together > needed else ""
                raise InvalidRequestError(
                    f"image {number} has {content.num_vectors} tokens, whose vectors take {together} bytes{beside}; "
                    f"allowed: {self.limits.capacity} bytes, the encoder's cache"
                )

    def long_chunk(self, sequence: Sequence, start: int, most: int) -> int:
        """Tokens, `most` at most, that a long step beside decoding rows computes of a prompt from `start` on; 0: no
        such step is due, or images are not encoded. See `ImageShare`."""
        behind = [one for one in sequence.contents if one.end > start]
        if not all(self.books.is_held(vectors_key(one, sequence.params.cache_salt)) for one in behind):
            return 0
        tokens = self.share.long_chunk(min(most, len(sequence.token_ids) - start), start)
        if tokens <= self.share.prompt_tokens(most, start):
            return 0
        self.share.begin_long()
        return tokens

    def whole_spans(self, sequence: Sequence, start: int, end: int) -> int:
        """Where a chunk from `start` ends that may not end inside of an image whose tokens see each other: before the
        image, or behind it where the chunk begins with it."""
        if self.limits.bidirectional:
            for content in sequence.contents:
                if content.start < end < content.end:
                    return content.start if content.start > start else content.end
        return end

    def before_spans(self, sequence: Sequence, start: int, end: int) -> int:
        """As `whole_spans` for a chunk that cannot be longer: `start` where it has to wait."""
        return start if (whole := self.whole_spans(sequence, start, end)) > end else whole

    def reach(
        self, sequence: Sequence, row: int, start: int, end: int, budget: int, builder: StepPlanBuilder, step: int
    ) -> tuple[int, int]:
        """Where the chunk from `start`, to `end` at most, of a sequence that has this row, or gets it now, ends by the
        vectors that are there; and what of `budget` encoding takes in this step. Encodes the first missing images on
        the way."""
        end, spent = self._reach(sequence, row, start, end, budget, builder, step)
        if end < len(sequence.token_ids):
            end = max(start, end // self._multiple * self._multiple)
        self.share.spend(spent, end - start, start)
        return end, spent

    def _reach(
        self, sequence: Sequence, row: int, start: int, end: int, budget: int, builder: StepPlanBuilder, step: int
    ) -> tuple[int, int]:
        tokens = self.share.prompt_tokens(budget, start)
        at, spent = start, 0
        for content in self._within(sequence, start, end):
            room = start + tokens - spent
            if content.start > room:
                return max(at, room), spent
            at = max(at, content.start)
            key = vectors_key(content, sequence.params.cache_salt)
            most = min(budget - (at - start), self.share.encoding(budget))
            spent += self._encode(sequence, row, content, most - spent, builder, step)
            if not self.books.is_held(key):
                return at, spent
            self.books.pin(key, sequence.uid, step)
            room = max(at, start + tokens - spent)
            if room < min(content.end, end):
                return max(start, self.whole_spans(sequence, start, room)), spent
            at = min(content.end, end)
        return max(at, min(end, start + tokens - spent)), spent

    def note_chunk(self, sequence: Sequence, end: int, step: int) -> None:
        """A step computes the row's tokens up to `end`: behind it earlier images are not needed."""
        for content in sequence.contents:
            if content.end <= end:
                self._passed.append(_Passed(step, vectors_key(content, sequence.params.cache_salt), sequence.uid))

    def note_end(self, plan: StepPlan, failed: frozenset[int], *, executed: bool) -> None:
        """A step has been committed: what it encoded for rows that failed is worthless."""
        if not executed:
            self.books.free_again(plan.freed_vectors)
        for one in plan.encode:
            if not executed or one.row in failed:
                self.books.drop(one.key)
        for passed in self._passed:
            if passed.step <= plan.step:
                self.books.unpin(passed.key, passed.uid)
        self._passed = [one for one in self._passed if one.step > plan.step]

    def leave(self, sequence: Sequence) -> None:
        """No step in flight includes the sequence, and it has no row."""
        for content in sequence.contents:
            key = vectors_key(content, sequence.params.cache_salt)
            self.books.unpin(key, sequence.uid)
            if sequence.failed:  # perhaps by them
                self.books.drop(key)

    def _within(self, sequence: Sequence, start: int, end: int) -> Iterator[Content]:
        return (one for one in sequence.contents if one.end > start and one.start < end)

    def _encode(
        self, sequence: Sequence, row: int, content: Content, budget: int, builder: StepPlanBuilder, step: int
    ) -> int:
        """Plans what fits of an image's encoding; one unit at least in a step without others. Returns the cost."""
        books, limits = self.books, self.limits
        key = vectors_key(content, sequence.params.cache_salt)
        if books.is_held(key):
            return 0
        first, units = books.done_of(key), limits.num_units(content)
        patches = limits.num_patches(content)
        count, cost = self._costs.most(content, first, budget)
        if not count:
            if budget <= 0 or builder.num_encoding:
                return 0
            count, cost = 1, self._costs.of_one(content, first)
        vector_bytes = content.num_vectors * limits.vector_bytes
        # Chunks that end with pages may need several images at once, of which two sequences could each have some.
        owner = sequence.uid if self._multiple > 1 and not builder.num_encoding else None
        if not books.begin(key, units, patches * limits.state_bytes, vector_bytes, step, owner):
            return 0
        books.pin(key, sequence.uid)
        if first == 0:
            self._patches += patches
        builder.encode(EncodeSlice(row, key, content, first, first + count, books.rank_of(key)))
        books.advance(key, first + count, step)
        return int(cost) + 1
