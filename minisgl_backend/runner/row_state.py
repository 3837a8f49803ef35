"""All that a runner keeps of rows."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.sampling.sampler import Sampler, sampling_kernels


@dataclass(frozen=True)
class RowState:
    """Rows on the device, what they ask of the sampler, and the sampler of just these."""

    table: RowTable
    sampling: SamplingRows
    sampler: Sampler

    @classmethod
    def of(cls, table: RowTable, sampling: SamplingRows) -> RowState:
        """With the sampling kernels where these can run."""
        kernels = sampling_kernels(table.max_rows, sampling.vocab_size, table.device)
        return cls(table, sampling, Sampler(table.params, table.tokens, sampling.penalties, sampling.rules, kernels))
