"""How many drafts there are follows from what they are worth and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.speculation.acceptance import Acceptance
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.costs import KEPT_STEPS, ProposalCosts, StepCosts
from minisgl_backend.step import StepTimes

MOST = 8
DRAFT = np.arange(MOST, dtype=np.int32)


def measured(flat: bool) -> DraftControl:
    """Of a device that computes 16 tokens in the time of one, or in 16 times that."""
    control = DraftControl(MOST)
    for _ in range(5):
        for tokens in (1, 2, 4, 8, 16):
            seconds = 1.0 if flat else float(tokens)
            control.note_step(tokens, seconds, overlapped=False)
            control.note_step(tokens, seconds, overlapped=True)
    return control


def chosen(control: DraftControl, rows: int = 1, room: int = 64) -> list[int]:
    return control.choose(range(rows), range(rows), [DRAFT] * rows, rows, room)


def test_right_drafts_are_verified_where_steps_cost_little_more() -> None:
    control = measured(flat=True)
    for _ in range(30):
        control.note(0, 0, MOST, MOST)
    assert chosen(control) == [MOST]
    control.decide([0], [0], 1, 64)
    assert control.is_on


def test_drafts_that_cost_what_they_bring_are_none() -> None:
    control = measured(flat=False)
    for _ in range(5):
        control.note(0, 0, MOST, 2)
    assert chosen(control) == [0]
    control.decide([0], [0], 1, 64)
    assert not control.is_on


def test_a_draft_is_as_long_as_it_is_right() -> None:
    control = DraftControl(MOST)
    for tokens in range(1, 17):
        control.note_step(tokens, 1.0 + 0.05 * tokens, overlapped=False)
    for _ in range(60):
        control.note(0, 0, MOST, 3)
    assert chosen(control) == [3]


def test_wrong_drafts_end_speculation_and_right_ones_bring_it_back() -> None:
    control = measured(flat=True)
    control.note_step(1, 0.9, overlapped=True)  # to wait for a commit costs a tenth
    for _ in range(4):
        control.note_step(1, 0.9, overlapped=True)
    for _ in range(60):
        control.note_found(0, 0, False)
        control.note(0, 0, 4, 0)
    control.decide([0], [0], 1, 64)
    assert not control.is_on
    for _ in range(20):
        control.note_found(0, 0, True)
        control.note(0, 0, MOST, MOST)
    control.decide([0], [0], 1, 64)
    assert control.is_on


def test_what_there_is_room_for_goes_to_the_likeliest_drafts() -> None:
    control = measured(flat=True)
    for _ in range(20):
        control.note(0, 0, MOST, 1)
        control.note(1, 1, MOST, MOST)
    first, second = chosen(control, rows=2, room=5)
    assert first + second <= 5
    assert second >= 4


def test_there_is_no_speculation_without_room_or_rows() -> None:
    control = measured(flat=True)
    control.is_on = True
    control.decide([], [], 3, 64)
    assert not control.is_on
    control.is_on = True
    control.decide([0], [0], 64, 0)
    assert not control.is_on


def test_costs_are_medians_between_which_lines_are_drawn() -> None:
    costs = StepCosts()
    assert costs.of([1]) is None
    for seconds in (1.0, 1.0, 50.0):
        costs.note(1, seconds)
    costs.note(5, 3.0)
    found = costs.of([1, 3, 5, 15])
    assert found is not None
    assert found.tolist() == pytest.approx([1.0, 2.0, 3.0, 3.0 + 10 * 0.01 * 3.0])


def test_what_no_step_has_shown_is_in_proportion_to_what_was_timed_at_start() -> None:
    costs = StepCosts([(1, 0.01), (2, 0.02), (34, 0.03)])
    costs.note(1, 5.0)
    found = costs.of([1, 2, 18, 34])
    assert found is not None
    assert found.tolist() == pytest.approx([5.0, 10.0, 12.5, 15.0])
    costs.note(2, 6.0)
    found = costs.of([1, 2, 34])
    assert found is not None
    assert found.tolist() == pytest.approx([5.0, 6.0, 9.0])


DEAR = StepTimes(prompts=((0, 0.010), (1, 0.018), (32, 0.025)), rows=((1, 0.010),))
CHEAP = StepTimes(prompts=((0, 0.010), (1, 0.0101), (32, 0.012)), rows=((1, 0.010),))


def test_where_drafts_cost_much_a_sequence_has_none_before_its_own_proposals_were_right() -> None:
    """However right those of others were: an answer of 32 tokens is 3% longer for a step."""
    chosen_of = {}
    for name, times in {"dear": DEAR, "cheap": CHEAP}.items():
        control = DraftControl(MOST, times)
        for uid in range(20):
            control.note_found(0, uid, True)
            control.note(0, uid, MOST, MOST)
        control.decide([0], [100], 1, 64)
        before = control.choose([0], [100], [DRAFT], 1, 64) if control.is_on else [0]
        control.note_found(0, 100, True)
        control.note(0, 100, 4, 4)
        control.decide([0], [100], 1, 64)
        assert control.is_on
        chosen_of[name] = before, control.choose([0], [100], [DRAFT], 1, 64)
    assert chosen_of == {"dear": ([0], [MOST]), "cheap": ([MOST], [MOST])}


def test_what_was_measured_long_ago_is_forgotten() -> None:
    costs = StepCosts()
    costs.note(8, 100.0)
    for _ in range(KEPT_STEPS + 1):
        costs.note(1, 1.0)
    found = costs.of([8])
    assert found is not None
    assert found[0] < 2.0


def test_a_new_sequence_is_taken_to_be_like_the_others() -> None:
    everyone = Acceptance(MOST)
    for _ in range(50):
        everyone.note(MOST, 0)
    assert Acceptance(MOST, everyone).all_right(1)[0] < 0.01
    assert Acceptance(MOST).all_right(1)[0] > 0.5


def test_where_there_is_no_room_there_are_no_drafts() -> None:
    control = measured(flat=True)
    for row in range(10):
        control.note(row, row, MOST, MOST)
    assert chosen(control, rows=10, room=-4) == [0] * 10


def test_a_disturbance_while_drafts_were_verified_is_forgotten() -> None:
    control = measured(flat=True)
    for tokens in range(1, 17):
        for _ in range(8):
            control.note_step(tokens, 100.0, overlapped=False)
    control.decide([0], [0], 1, 64)
    assert not control.is_on
    for _ in range(2 * KEPT_STEPS):
        control.note_step(1, 1.0, overlapped=True)
    for _ in range(30):
        control.note(0, 0, MOST, MOST)
    control.decide([0], [0], 1, 64)
    assert control.is_on


@pytest.mark.parametrize(
    ("right", "pass_s", "expected"),
    [
        (MOST, 0.1, MOST),  # each brings a token for a tenth of a step
        (3, 0.1, 3),
        (MOST, 1.2, 0),  # slower than the model's own tokens
        (0, 0.1, 0),
    ],
)
def test_proposals_that_cost_steps_are_as_many_as_they_are_worth(right: int, pass_s: float, expected: int) -> None:
    control = measured(flat=True)
    for count in (1, 4):
        control.note_proposing(count, count * pass_s)
    for _ in range(60):
        control.note(0, 0, MOST, right)
    control.decide_depth([0], [0], 1, 64)
    assert control.depth * control.is_on == expected


def test_forced_text_is_waited_for_where_it_pays() -> None:
    """Its acceptance is its own: a row whose drafts were wrong may have text that is forced."""
    control = DraftControl(MOST)
    for tokens in range(1, 17):
        control.note_step(tokens, 1.0 + 0.02 * tokens, overlapped=False)
    for _ in range(30):
        control.note(0, 0, MOST, 0)
        control.note_forced(MOST, MOST)
    assert chosen(control) == [0]
    assert control.choose([0], [0], [DRAFT], 1, 64, {0}) == [MOST]
    assert control.forced_pay([3], 1, 64)
    assert not control.forced_pay([3], 64, 0)
    assert not control.forced_pay([1], 50, 14)  # a fiftieth more
    assert not measured(flat=False).forced_pay([3], 1, 64)


def test_what_was_not_measured_of_proposals_is_in_proportion() -> None:
    costs = ProposalCosts()
    assert costs.of([1, 4]).tolist() == [0.0, 0.0]
    for seconds in (3.0, 3.0, 50.0):
        costs.note(3, seconds)
    costs.note(5, 4.0)
    assert costs.of([1, 3, 4, 5, 10]).tolist() == [1.0, 3.0, 3.5, 4.0, 8.0]


def test_a_proposer_waits_for_no_rows() -> None:
    control = measured(flat=True)
    control.is_on = True
    control.decide_depth([], [], 8, 64)
    assert not control.is_on
