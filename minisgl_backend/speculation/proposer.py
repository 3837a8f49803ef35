"""What proposes the next tokens of a sequence.

There are two kinds. One proposes on the host, from tokens that are known: a `Proposer`. The other runs on the device,
in steps of its own between those of the model: there the runner has a `DeviceProposer` (runner/proposers/proposer.py),
the scheduler plans its steps (scheduler/proposing.py), and what they propose is kept in `DeviceProposals` until the
model's next step is planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.speculative_config import SpeculativeConfig


class Proposer(ABC):
    """Proposes on the host, from tokens that are known. It may be wrong: what it says decides about speed alone."""

    @abstractmethod
    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        """The tokens that may follow, the next one first; int32 [at most `most`], none where it knows none.

        Args:
            row: that the sequence has; whatever is kept of a row is bounded.
            uid: of the sequence: one that is new in its row is another sequence.
            token_ids: its prompt and its answer so far, int32 [num_tokens]; a view, longer with each call.
            most: 1 or more.
        """


class DeviceProposals(Proposer):
    """The host's side of a proposer that runs on the device: what it has proposed last, by row."""

    def __init__(self, *, catches_up: bool) -> None:
        """`catches_up`: its own steps bring it the tokens that it has not seen; else it sees them in the model's."""
        self.catches_up = catches_up
        self._rows: dict[int, tuple[int, int, Int32Array]] = {}  # row -> uid, tokens of the sequence then, what follows

    def note(self, row: int, uid: int, total: int, proposed: Int32Array) -> None:
        """Behind the first `total` tokens of the sequence it has proposed these."""
        self._rows[row] = uid, total, proposed

    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        known = self._rows.get(row)
        return known[2][:most] if known is not None and known[:2] == (uid, len(token_ids)) else NO_INT32


def create_proposer(config: SpeculativeConfig | None) -> Proposer | None:
    """The host's proposer, or its side of the device's; None where there is no speculation."""
    if config is None:
        return None
    row = config.row
    return DeviceProposals(catches_up=row.catches_up) if row.on_device else load_attribute(row.proposer)(config)
