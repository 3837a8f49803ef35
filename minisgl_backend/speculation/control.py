"""How many drafts of each row a step verifies: as many as make it deliver the most tokens a second.

A step delivers a token of each row and the drafts that are right. What it delivers is expected by how often drafts of
late were right, row by row and position by position (`Acceptance`), and what it takes was measured (`StepCosts`). So
speculation ends by itself where it does not pay. It comes back by itself, too: while it is off, proposals are compared
with what is sampled without them, which costs the device nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from minisgl_backend.arrays import Float64Array, Int32Array
from minisgl_backend.speculation.acceptance import Acceptance
from minisgl_backend.speculation.costs import ProposalCosts, StepCosts
from minisgl_backend.step import StepTimes

FIRST_DEPTH = 4  # of a proposer with steps of its own, before it is known what these take
BEGIN_GAIN = 1.03  # speculation begins where it promises so much more, and ends where it promises nothing
COSTLY = (
    1.15  # times a step without, from which on a step with a draft more costs much: on a CPU one may take twice as long
)


class DraftControl:
    """Used by the step loop alone.

    Steps with drafts are planned when the step before is committed, others while it runs. What both take is measured
    apart, and so the loss of overlap is part of what drafts must pay for.
    """

    def __init__(self, most: int, times: StepTimes | None = None) -> None:
        """`most`: drafts of one row in one step. `times`: of steps at start, by which costs are reckoned that no
        step has shown yet."""
        self.is_on = False  # steps are planned when the tokens before are known, so that there may be drafts
        self._most = most
        self._all = Acceptance(most)
        self._rows: dict[int, tuple[int, Acceptance]] = {}  # row -> uid, and how often its drafts are right
        self._forced = Acceptance(most)  # of all drafts that are text forced by a grammar
        # A draft is computed as a prompt token is, and a row's own token counts.
        timed = [] if times is None else [(1 + tokens, seconds) for tokens, seconds in times.prompts]
        self._waiting, self._overlapped = StepCosts(timed), StepCosts(timed)
        self.depth = min(most, FIRST_DEPTH)  # tokens that such a proposer proposes of each row
        self._proposing = ProposalCosts()

    def note_found(self, row: int, uid: int, found: bool) -> None:
        """Something was proposed for the row, or nothing."""
        for one in (self._of(row, uid), self._all):
            one.note_found(found)

    def note(self, row: int, uid: int, drafted: int, accepted: int) -> None:
        """Of the row's drafts, 1 or more, the first ones were right."""
        for one in (self._of(row, uid), self._all):
            one.note(drafted, accepted)

    def note_forced(self, drafted: int, accepted: int) -> None:
        """Of a row's drafts that a grammar forced, 1 or more, the first ones were right."""
        self._forced.note(drafted, accepted)

    def note_step(self, num_tokens: int, seconds: float, *, overlapped: bool) -> None:
        """A step that only decoded has ended."""
        for costs, is_kind in ((self._overlapped, overlapped), (self._waiting, not overlapped)):
            if is_kind:
                costs.note(num_tokens, seconds)
            else:
                costs.pass_step()

    def note_proposing(self, count: int, seconds: float) -> None:
        """A step of a proposer that has steps of its own, with `count` tokens of each row, has ended."""
        self._proposing.note(count, seconds)

    def decide_depth(self, rows: Sequence[int], uids: Sequence[int], num_rows: int, room: int) -> None:
        """As `decide`, for a proposer that has steps of its own: how many tokens these propose of each row, too, since
        each of them costs, whether it is verified or not."""
        if not rows or room < 1:
            self.is_on = False
            return
        right = np.stack([self._of(row, uid).all_right(self._most) for row, uid in zip(rows, uids, strict=True)])
        counts = np.arange(1, self._most + 1)
        # The best ones have the room: the first of each row, as a rule, then the second of each.
        drafts = np.minimum(counts * len(rows), room)
        best = np.cumsum(-np.sort(-right, axis=None))
        reachable = np.cumsum(right.sum(axis=0))
        delivered = num_rows + np.minimum(best[drafts - 1], reachable)
        rates = delivered / (self._cost(num_rows + drafts.astype(np.float64)) + self._proposing.of(counts.tolist()))
        (plain,) = num_rows / self._cost([num_rows], overlapped=True)
        gain = rates.max() / plain
        self.is_on = bool(gain > (1.0 if self.is_on else BEGIN_GAIN))
        if self._proposing.is_known:
            self.depth = int(counts[np.argmax(rates)])

    def decide(self, rows: Sequence[int], uids: Sequence[int], num_rows: int, room: int) -> None:
        """Whether speculation is on from here on, where these rows may have drafts, `num_rows` decode and a step has
        `room` tokens for drafts."""
        if not rows or room < 1:
            self.is_on = False
            return
        known = [self._of(row, uid) for row, uid in zip(rows, uids, strict=True)]
        found = np.repeat([one.found for one in known], self._most)
        costly = self._is_costly(num_rows)
        right = np.concatenate([one.all_right(self._most, costly=costly) for one in known])
        order = np.argsort(-right, kind="stable")
        found, right = found[order], right[order]
        tokens = np.cumsum(found)
        fits = tokens <= room
        sizes = num_rows + np.concatenate([[0.0], tokens[fits]])
        rates = (num_rows + np.concatenate([[0.0], np.cumsum(found * right)[fits]])) / self._cost(sizes)
        (plain,) = num_rows / self._cost([num_rows], overlapped=True)
        best = rates[1:].max(initial=0.0)
        self.is_on = bool(best > rates[0] and best > plain * (1.0 if self.is_on else BEGIN_GAIN))

    def forced_pay(self, counts: Sequence[int], num_rows: int, room: int) -> bool:
        """Whether it pays that the next step waits for the commit, to verify text forced by grammars: `counts` drafts
        of some rows, where `num_rows` decode and a step has `room` tokens for drafts."""
        right = np.concatenate([self._forced.all_right(count) for count in counts]) if counts else np.empty(0)
        right = -np.sort(-right)[: max(room, 0)]
        if not len(right):
            return False
        rates = (num_rows + np.cumsum(right)) / self._cost(num_rows + np.arange(1.0, len(right) + 1))
        (plain,) = num_rows / self._cost([num_rows], overlapped=True)
        return bool(rates.max() > BEGIN_GAIN * plain)

    def choose(
        self,
        rows: Sequence[int],
        uids: Sequence[int],
        proposed: Sequence[Int32Array],
        num_rows: int,
        room: int,
        forced: Container[int] = (),
    ) -> list[int]:
        """How many of the proposed tokens of each row to verify; at most `room` together. `forced`: uids of those whose
        tokens a grammar forces."""
        costly = self._is_costly(num_rows)
        right = [
            self._forced.all_right(len(tokens))
            if uid in forced
            else self._of(row, uid).all_right(len(tokens), costly=costly)
            for row, uid, tokens in zip(rows, uids, proposed, strict=True)
        ]
        counts = [0] * len(rows)
        if not any(map(len, right)):
            return counts
        every = np.concatenate(right)
        of_row = np.repeat(np.arange(len(rows)), [len(one) for one in right])
        best = np.argsort(-every, kind="stable")[
            : max(room, 0)
        ]  # a row's first drafts come first: each is as likely at least
        delivered = num_rows + np.concatenate([[0.0], np.cumsum(every[best])])
        rates = delivered / self._cost(num_rows + np.arange(float(len(delivered))))
        most = int(np.argmax(rates))
        for row, count in zip(*np.unique(of_row[best[:most]], return_counts=True), strict=True):
            counts[row] = int(count)
        return counts

    def _cost(self, sizes: Sequence[float] | Float64Array, *, overlapped: bool = False) -> Float64Array:
        first, second = self._waiting, self._overlapped
        if overlapped:
            first, second = second, first
        costs = first.of(sizes)
        if costs is None:
            costs = second.of(sizes)
        return self._waiting.expected(sizes) if costs is None else costs

    def _is_costly(self, num_rows: int) -> bool:
        """Whether a wrong draft is much of a loss, where `num_rows` decode."""
        plain, drafting = self._cost([num_rows, num_rows + 1])
        return bool(drafting > COSTLY * plain)

    def _of(self, row: int, uid: int) -> Acceptance:
        known = self._rows.get(row)
        if known is None or known[0] != uid:
            known = self._rows[row] = uid, Acceptance(self._most, self._all)
        return known[1]
