"""Output records for clients: collected while steps are committed, drained as parallel arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from minisgl_backend.arrays import IndexArray, Int32Array, Int64Array, UInt8Array
from minisgl_backend.request import FinishReason
from minisgl_backend.step import Logprobs, SequenceDetail

NO_TOKEN = -1
NO_DETAIL = SequenceDetail()


@dataclass(frozen=True, slots=True)
class SequenceOutputs:
    """Parallel arrays, one entry per record. The records of one sequence are in order."""

    uids: Int64Array  # [num_records]
    token_ids: Int32Array  # [num_records]; -1 in a record without a token
    reasons: UInt8Array  # [num_records]; a FinishReason, 0: the sequence goes on
    details: dict[int, SequenceDetail] = field(default_factory=dict)  # by record index


class OutputCollector:
    """Collects the records of one or more commits until they are drained."""

    def __init__(self) -> None:
        self._runs: list[tuple[Int64Array, Int32Array, UInt8Array]] = []
        self._uids: list[int] = []  # single records after the last run of arrays
        self._token_ids: list[int] = []
        self._reasons: list[int] = []
        self._details: dict[int, SequenceDetail] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, uid: int, token_id: int, reason: FinishReason, detail: SequenceDetail | None = None) -> None:
        """One record."""
        self._uids.append(uid)
        self._token_ids.append(token_id)
        self._reasons.append(reason)
        if detail is not None:
            self._details[self._count] = detail
        self._count += 1

    def add_run(self, uids: Int64Array, token_ids: Int32Array, reasons: UInt8Array) -> int:
        """Adds records as arrays, which are kept and must not change. Returns the index of the first one."""
        self._close_run()
        first = self._count
        self._runs.append((uids, token_ids, reasons))
        self._count += len(uids)
        return first

    def add_logprobs(self, logprobs: Mapping[int, Logprobs], first: int, start: int, kept: IndexArray | None) -> None:
        """Attaches log-probabilities to decode entries; `logprobs` is keyed by result index.

        first: result index of the first decode entry; start: its record's index; kept: the decode entries that have a
        record, ascending [num_records]; None: all.
        """
        for index, found in logprobs.items():
            record = index - first
            if record < 0:
                continue
            if kept is not None:
                at = int(np.searchsorted(kept, record))
                if at == len(kept) or kept[at] != record:
                    continue
                record = at
            self._details[start + record] = SequenceDetail(logprobs=found)

    def records_from(self, first: int) -> list[int]:
        """The uids of all records from index `first` on, added by `add_run` or `add`."""
        self._close_run()
        found: list[int] = []
        count = self._count
        for uids, _, _ in reversed(self._runs):
            if count <= first:
                break
            found = uids.tolist() + found
            count -= len(uids)
        return found[first - count :]

    def add_drafts(self, index: int, drafted: int, accepted: int) -> None:
        """Attaches the sequence's counts of drafted and accepted tokens so far to a record."""
        detail = self._details.get(index, NO_DETAIL)
        self._details[index] = msgspec.structs.replace(detail, draft_tokens=drafted, accepted_draft_tokens=accepted)

    def drain(self) -> SequenceOutputs | None:
        """Everything since the last call; None when there is nothing."""
        if not self._count:
            return None
        self._close_run()
        uids, token_ids, reasons = self._runs[0]
        if len(self._runs) > 1:
            uids = np.concatenate([run[0] for run in self._runs])
            token_ids = np.concatenate([run[1] for run in self._runs])
            reasons = np.concatenate([run[2] for run in self._runs])
        outputs = SequenceOutputs(uids, token_ids, reasons, self._details)
        self._runs, self._details, self._count = [], {}, 0
        return outputs

    def _close_run(self) -> None:
        if not self._uids:
            return
        self._runs.append(
            (
                np.array(self._uids, dtype=np.int64),
                np.array(self._token_ids, dtype=np.int32),
                np.array(self._reasons, dtype=np.uint8),
            )
        )
        self._uids, self._token_ids, self._reasons = [], [], []
