"""Reads and writes of the row tables around a forward pass, one kernel each, in the Triton language.

In plain torch these are a dozen launches of tiny kernels, which cost a decode step at small batch their full time. They
are launched without `pdl` on purpose: `lookup` begins the chain of kernels of a step, see plain/small_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv

_TILE = 128
_ALIGNMENT = 4  # int32 words of 16 bytes


def lookup(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    shifts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, int32 [n], and KV slots, int32 [num_groups, n], at (row, position); tokens and page_tables as in
    runner.RowTable. And the positions, with their rows' `shifts` (int32 [num_rows]) added."""
    n, num_groups = rows.shape[0], page_tables.shape[0]
    # Two tensors and not one: kernels are recompiled for pointers that are not aligned to 16 bytes.
    token_ids = torch.empty(n, dtype=torch.int32, device=rows.device)
    width = -(-n // _ALIGNMENT) * _ALIGNMENT
    slots = torch.empty((num_groups, width), dtype=torch.int32, device=rows.device)
    shifted = positions if shifts is None else torch.empty(n, dtype=torch.int32, device=rows.device)
    _lookup_kernel[(cdiv(n, _TILE), num_groups)](
        rows, positions, tokens, page_tables, shifts, token_ids, slots, shifted, n, width, tokens.stride(0),
        page_tables.stride(1), page_tables.stride(0), PAGE_SIZE=page_size, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return token_ids, slots[:, :n], shifted


@triton.jit(do_not_specialize=["n", "slots_stride", "group_stride"])
def _lookup_kernel(
    rows_ptr, positions_ptr, tokens_ptr, table_ptr, shifts_ptr, ids_ptr, slots_ptr, shifted_ptr, n, slots_stride,
    tokens_stride, table_stride, group_stride, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    table_ptr += group.to(tl.int64) * group_stride
    slots_ptr += group * slots_stride
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = i < n
    row = tl.load(rows_ptr + i, mask=ok, other=0).to(tl.int64)
    position = tl.load(positions_ptr + i, mask=ok, other=0)
    if group == 0:
        token = tl.load(tokens_ptr + row * tokens_stride + position, mask=ok, other=0)
        tl.store(ids_ptr + i, token, mask=ok)
        if shifts_ptr is not None:
            tl.store(shifted_ptr + i, position + tl.load(shifts_ptr + row, mask=ok, other=0), mask=ok)
    page = tl.load(table_ptr + row * table_stride + position // PAGE_SIZE, mask=ok, other=0)
    tl.store(slots_ptr + i, page * PAGE_SIZE + position % PAGE_SIZE, mask=ok)


def scatter(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """table[rows, columns] = values; all int32, table [num_rows, num_columns], the others [n]."""
    n = rows.shape[0]
    _scatter_kernel[(cdiv(n, _TILE),)](table, rows, columns, values, n, table.stride(0), TILE=_TILE, num_warps=4)


@triton.jit(do_not_specialize=["n"])
def _scatter_kernel(table_ptr, rows_ptr, columns_ptr, values_ptr, n, stride, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ok = i < n
    row = tl.load(rows_ptr + i, mask=ok, other=0).to(tl.int64)
    column = tl.load(columns_ptr + i, mask=ok, other=0)
    tl.store(table_ptr + row * stride + column, tl.load(values_ptr + i, mask=ok, other=0), mask=ok)
