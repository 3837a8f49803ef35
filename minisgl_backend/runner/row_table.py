"""What the device knows of each row: its pages, its tokens, its sampling parameters."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch

from minisgl_backend.kernels.sampling.layout import NUM_PARAMS


@dataclass(frozen=True)
class RowUpdates:
    """The changes that one plan makes, as device tensors, all int32."""

    page_rows: torch.Tensor  # [num_new_pages]
    page_columns: torch.Tensor  # [num_new_pages]
    page_ids: torch.Tensor  # [num_new_pages]
    admitted_rows: torch.Tensor  # [num_admitted]
    admitted_params: torch.Tensor  # [num_admitted, NUM_PARAMS]
    token_rows: torch.Tensor  # [num_new_tokens]
    token_positions: torch.Tensor  # [num_new_tokens]
    token_ids: torch.Tensor  # [num_new_tokens]


class RowTable:
    """Tables indexed by row, on the device. The last row pads captured graphs and owns only page 0."""

    page_table: torch.Tensor  # int32 [max_rows, max_pages_per_row]
    tokens: torch.Tensor  # int32 [max_rows, max_seq_len + 1]  by position
    params: torch.Tensor  # int32 [max_rows, NUM_PARAMS]  see kernels.sampling_layout

    def __init__(self, *, max_running: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        self.max_rows = max_running + 1
        self.padding_row = max_running
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.device = device
        max_pages_per_row = -(-max_seq_len // page_size)
        self.page_table = torch.zeros(self.max_rows, max_pages_per_row, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(self.max_rows, max_seq_len + 1, dtype=torch.int32, device=device)
        self.params = torch.zeros(self.max_rows, NUM_PARAMS, dtype=torch.int32, device=device)
        self._kernels = _kernels(device)

    def apply(self, updates: RowUpdates) -> None:
        """Writes the pages, tokens and parameters of one plan; in stream order, never waits."""
        if len(updates.page_ids):
            self._scatter(self.page_table, updates.page_rows, updates.page_columns, updates.page_ids)
        if len(updates.admitted_rows):
            self.params[updates.admitted_rows] = updates.admitted_params
            self._scatter(self.tokens, updates.token_rows, updates.token_positions, updates.token_ids)

    def admit(self, row: int, pages: torch.Tensor, tokens: torch.Tensor, params: torch.Tensor) -> None:
        """Writes one row from its first page and token on, without kernels of indices; all int32, in stream order."""
        self.page_table[row, : len(pages)] = pages
        self.tokens[row, : len(tokens)] = tokens
        self.params[row] = params

    def lookup(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at these positions and where in the KV pool they go: token ids and slots, int32 [num_tokens]."""
        if self._kernels is not None:
            return self._kernels.lookup(rows, positions, self.tokens, self.page_table, self.page_size)
        return self.tokens[rows, positions], self.slots(rows, positions)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in the KV pool the tokens at these positions go; int32 [num_tokens]."""
        pages = self.page_table[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def write_tokens(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Records sampled tokens, so that the next step can read them without the host."""
        self._scatter(self.tokens, rows, positions, token_ids)

    def _scatter(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
        if self._kernels is not None:
            self._kernels.scatter(table, rows, columns, values)
        else:
            table[rows, columns] = values


def _kernels(device: torch.device) -> ModuleType | None:
    """The module of Triton-language kernels for row tables, where it can run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("minisgl_backend.kernels.row_tables")
