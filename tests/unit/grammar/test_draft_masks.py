"""Masks behind drafts: what cannot be masked is not accepted, and nothing is refused for it."""

from __future__ import annotations

import itertools

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.grammar.draft_masks import DraftMasks
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.request import Grammar
from minisgl_backend.step import StepPlan, StepResult

REGEX = Grammar(kind="regex", text="[0-9]*")


class Matcher:
    """Allows tokens below 10; its mask behind 7 raises, and 9 ends it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> bool:
        if token >= 10:
            return False
        self.tokens.append(token)
        return True

    def is_terminated(self) -> bool:
        return self.tokens[-1:] == [9]

    def fill_next_token_bitmask(self, bitmask: Int32Array, index: int) -> None:
        if self.tokens[-1] == 7:
            raise RuntimeError("too many states")
        bitmask[index] = len(self.tokens)

    def rollback(self, count: int) -> None:
        del self.tokens[-count:]


def filled(
    drafts: list[int], grammar: Grammar = REGEX, masks: DraftMasks | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Result indices that have a mask, what stands in it, and those that have none; nothing is left of the drafts."""
    masks, matcher = masks or DraftMasks(lambda: 0.0), Matcher()
    bitmask = np.zeros((len(drafts), 1), dtype=np.int32)
    masks.begin()
    drafted = [(5 + index, 1, draft) for index, draft in enumerate(drafts)]
    indices = masks.fill(drafted, {1: matcher}, {1: grammar}, bitmask)
    assert matcher.tokens == []
    return indices, bitmask[: len(indices), 0].tolist(), masks.unmasked


def test_matchers_follow_drafts_as_far_as_they_go() -> None:
    assert filled([1, 2, 3]) == ([5, 6, 7], [1, 2, 3], [])
    assert filled([1, 12, 3]) == ([5], [1], [6, 7])
    assert filled([1, 9, 3]) == ([5], [1], [6, 7])


def test_what_a_mask_raises_behind_a_draft_ends_nothing() -> None:
    assert filled([1, 7, 3]) == ([5], [1], [6, 7])


def test_masks_behind_drafts_have_so_much_time_together() -> None:
    clock = itertools.count(step=0.012)
    assert filled([1, 2, 3], masks=DraftMasks(lambda: next(clock))) == ([5], [1], [6, 7])


def test_texts_of_so_many_tokens_have_no_drafts() -> None:
    grammar = Grammar(kind="structural_tag", text='{"type": "any_text", "max_tokens": 5}')
    assert filled([1, 2], grammar) == ([], [], [5, 6])


class NoCompilers:
    """Never asked."""

    def close(self) -> None:
        pass


def test_a_step_that_asks_for_no_masks_has_left_none_out() -> None:
    """Its rows have no grammar; a sequence that waits has one, and the step before has left some out."""
    grammars = GrammarManager(NoCompilers())  # type: ignore[arg-type]
    grammars._matchers[1], grammars._grammars[1], grammars._draft_masks.unmasked = Matcher(), REGEX, [0, 7]
    rows, drafts = np.array([2, 2], dtype=np.int32), np.array([-1, 5], dtype=np.int32)
    plan = StepPlan(
        step=3,
        admitted=(),
        page_rows=NO_INT32,
        page_columns=NO_INT32,
        page_ids=NO_INT32,
        prefill=(),
        decode_rows=rows,
        decode_lengths=np.array([8, 9], dtype=np.int32),
        decode_uids=np.array([4, 4]),
        draft_tokens=drafts,
    )
    result = StepResult(step=3, token_ids=np.array([5, 6], dtype=np.int32), accepted=np.array([True, True]))
    grammars.begin(plan)
    grammars.advance(plan, result)
    assert result.accepted is not None
    assert result.accepted.all()
    grammars.close()
