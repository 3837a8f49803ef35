"""The state of each row on the device: its pages, its tokens, its sampling parameters."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType

import torch

from minisgl_backend.kernels.sampling.layout import NUM_PARAMS
from minisgl_backend.kv.groups import CacheGroup, ColumnLayout
from minisgl_backend.kv.zeros import zeros


class RowTable:
    """Tables indexed by row, on the device. The last row pads captured graphs and owns only page 0."""

    page_table: torch.Tensor  # int32 [max_rows, max_pages_per_row]  of the first cache group
    page_tables: tuple[torch.Tensor, ...]  # by cache group, where there are several
    tokens: torch.Tensor  # int32 [max_rows, max_seq_len + 1]  by position
    params: torch.Tensor  # int32 [max_rows, NUM_PARAMS]  see kernels.sampling.layout

    def __init__(
        self,
        *,
        max_running: int,
        max_seq_len: int,
        page_size: int,
        device: torch.device,
        columns: ColumnLayout | None = None,
    ) -> None:
        """`page_size`: of attention; `columns`: of the model; None: it has one cache group."""
        self.max_rows = max_running + 1
        self.padding_row = max_running
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.device = device
        self.columns = columns = columns or ColumnLayout((CacheGroup(),))
        self.num_groups = num_groups = columns.num_groups
        self.max_pages_per_row = columns.kernel_pages_for(max_seq_len, page_size)
        shape = (num_groups, self.max_rows, self.max_pages_per_row)
        self._pages = zeros(shape, torch.int32, device)
        self.page_table = self._pages[0]
        self.page_tables = tuple(self._pages) if num_groups > 1 else ()
        self.tokens = zeros((self.max_rows, max_seq_len + 1), torch.int32, device)
        self.params = torch.zeros(self.max_rows, NUM_PARAMS, dtype=torch.int32, device=device)
        self._kernels, self._scatter = _kernels(device), scatter_on(device)

    def apply(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Writes the pages, tokens and parameters of one plan, by the names of `BatchBuilder`; in stream order, never
        waits."""
        if "page_ids" in arrays:
            self._scatter(self._pages.flatten(0, 1), arrays["page_rows"], arrays["page_columns"], arrays["page_ids"])
        if "admitted_rows" in arrays:
            self.params[arrays["admitted_rows"]] = arrays["admitted_params"]
            self.write_tokens(arrays["admitted_token_rows"], arrays["admitted_positions"], arrays["admitted_tokens"])

    def admit(self, row: int, pages: torch.Tensor, tokens: torch.Tensor, params: torch.Tensor) -> None:
        """Writes one row from its first page and token on, by slices and not by index kernels; all int32, in stream
        order. pages: [num_groups, num_pages]."""
        self._pages[:, row, : pages.shape[1]] = pages
        self.tokens[row, : len(tokens)] = tokens
        self.params[row] = params

    def lookup(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Token ids at these positions, and their slots in the KV pool by cache group; int32 [num_tokens] each."""
        token_ids, slots, _ = self.lookup_shifted(rows, positions, None)
        return token_ids, slots

    def lookup_shifted(
        self, rows: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
        """`lookup`, and the positions with their rows' `shifts` (int32 [max_rows]) added, int32 [num_tokens]."""
        if self._kernels is not None:
            found = self._kernels.lookup(rows, positions, self.tokens, self._pages, self.page_size, shifts)
            return found[0], found[1].unbind(0), found[2]
        shifted = positions if shifts is None else positions + shifts[rows]
        return self.tokens[rows, positions], self.slots(rows, positions), shifted

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Slots in the KV pool of the tokens at these positions, by cache group; int32 [num_tokens] each."""
        columns, offsets = positions // self.page_size, positions % self.page_size
        tables = self.page_tables or (self.page_table,)
        return tuple(table[rows, columns] * self.page_size + offsets for table in tables)

    def write_tokens(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Records sampled tokens, so that the next step can read them without the host."""
        self._scatter(self.tokens, rows, positions, token_ids)


Scatter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def scatter_on(device: torch.device) -> Scatter:
    """What sets table[rows, columns] to values, in one launch; all int32, table [num_rows, num_columns], others [n]."""
    kernels = _kernels(device)
    scatter: Scatter = _scatter if kernels is None else kernels.scatter
    return scatter


def _scatter(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """See `scatter_on`."""
    table[rows, columns] = values


def _kernels(device: torch.device) -> ModuleType | None:
    """The module of Triton-language kernels for row tables, where it can run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("minisgl_backend.kernels.row_tables")
