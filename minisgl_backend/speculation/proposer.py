"""What proposes the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

from minisgl_backend.arrays import Int32Array


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
