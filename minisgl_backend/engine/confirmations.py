"""Which streams fell silent: compares what a front sent with what the detokenizer says it has handled.

Knows nothing of sockets or Triton.

A server may drop the queued responses of a cancelled request without a word. What still tells is order: responses
of one sender are handled in the order they were sent, so a response that is still unconfirmed when later ones of
the same sender are confirmed was dropped, and so is one that stays unconfirmed while the detokenizer is idle.
"""

from __future__ import annotations

from collections.abc import Sequence


class Confirmations:
    """Sent and confirmed counts of each stream; thread-safe.

    Sequence numbers count the responses of a stream and grow with each one; `sender` is the thread that sends the
    stream, always the same one for a stream. Times are time.monotonic() seconds.
    """

    def __init__(self, *, gap_grace_s: float = 0.03, silence_s: float = 0.6) -> None:
        """A gap counts after `gap_grace_s`; silence after `silence_s`."""

    def on_sent(self, uid: int, sequence_number: int, now: float, sender: int = 0) -> None:
        """Call before the send itself, so that a confirmation never overtakes it."""
        raise NotImplementedError

    def on_handled(self, uids: Sequence[int], sequence_numbers: Sequence[int], now: float) -> list[int]:
        """Counts one message of the detokenizer; returns the streams that are gone, each of them once."""
        raise NotImplementedError

    def expire(self, now: float) -> list[int]:
        """The streams that are gone by now without a new message, each of them once; call every 50 ms or so."""
        raise NotImplementedError

    def unconfirmed(self, uid: int) -> int:
        """Responses of the stream that lie between front and detokenizer; 0 for an unknown one."""
        raise NotImplementedError

    def forget(self, uid: int) -> None:
        """The stream's last response was sent, or the stream failed: whatever comes is of no interest."""
        raise NotImplementedError
