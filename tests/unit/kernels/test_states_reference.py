"""The gated delta rule in windows, folds and blocks is the plain recurrence: the reference in torch, in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from minisgl_backend.kernels.recurrent.calls import ChunkSpan, chunk_tables
from minisgl_backend.kv.state import StateLayout
from minisgl_backend.kv.state_config import StateConfig
from tests.recurrent import RecurrentRows, small


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sizes_of_qwen3_5_9b() -> None:
    config = StateConfig(num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, conv_width=4)
    layout = StateLayout.of([config, None] * 24, torch.bfloat16)
    assert layout is not None
    assert layout.bytes_per_slot == 24 * ((2 << 20) + 3 * 8192 * 2)
    entry = 16 * 128 * 2 + 32 * (128 * 4 + 4)
    assert layout.bytes_per_row(32, 3) == 24 * (35 * entry + 10 * 8192 * 2)
    half = StateLayout.of([config] * 24, torch.bfloat16, tp_size=2)
    assert half is not None
    assert half.bytes_per_slot * 2 == layout.bytes_per_slot
    assert StateLayout.of([None], torch.bfloat16) is None


def test_the_table_of_blocks() -> None:
    spans = [ChunkSpan(5, 32, 32 + 150, 2, 3, ((64, 7), (160, 8))), ChunkSpan(1, 0, 9, 0, 4)]
    blocks, rows = chunk_tables(spans, 16)
    assert blocks.tolist() == [
        [0, 0, 32, 32, 0, 7], [0, 32, 64, 64, 0, 0], [0, 96, 32, 128, 0, 8], [0, 128, 16, 160, 0, 0],
        [0, 144, 6, 176, 1, 0], [1, 150, 9, 0, 1, 0],
    ]  # fmt: skip
    assert rows.tolist() == [[5, 0, 150, 32, 2, 3, 0, 5, 4], [1, 150, 9, 0, 0, 4, 5, 1, 0]]


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_decoding_behind_prompts_of_all_lengths(page_size: int, group: int) -> None:
    """Rows of very different lengths in one launch, the hand-over at every place of a page, folds, beta up to 2."""
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129]
    rows = RecurrentRows(
        small(group), num_rows=len(lengths), num_tokens=150, page_size=page_size, beta_scale=1.0 + group % 2
    )
    expected = [rows.expected(row) for row in range(len(lengths))]
    found = rows.prefill(dict(enumerate(lengths)))
    for row, length in enumerate(lengths):
        assert_equal(found[row], expected[row][0][:length])
        assert_equal(rows.pool.layer(0).states[rows.slots[row]], expected[row][1][rows.borders[row]])
    for step in range(20):
        rows.fold()
        for row, out in rows.decode(dict.fromkeys(range(len(lengths)), 0), padding=step % 3).items():
            assert_equal(out, expected[row][0][rows.lengths[row] - 1 : rows.lengths[row]])
    for row in range(len(lengths)):
        assert_equal(rows.pool.layer(0).states[rows.slots[row]], expected[row][1][rows.borders[row]])


def test_chunks_end_at_borders_and_leave_checkpoints() -> None:
    rows = RecurrentRows(small(), num_rows=2, num_tokens=150)
    (expected, states), (other, _) = rows.expected(0), rows.expected(1)
    outs = [rows.prefill({0: 48, 1: 10}, {0: [(16, 6), (48, 5)]})]
    outs.append(rows.prefill({0: 48 + 64 + 16}, {0: [(64, 4)]}))
    outs.append(rows.prefill({0: 141}, {0: [(128 + 0, 4)]}))  # a border at its start is the source's: nothing to write
    assert_equal(torch.cat([out[0] for out in outs]), expected[:141])
    assert_equal(outs[0][1], other[:10])
    for slot, border in ((6, 16), (5, 48), (4, 64), (1, 128)):
        assert_equal(rows.pool.layer(0).states[slot], states[border])
    # From a checkpoint another row goes on.
    rows.inputs[1], rows.lengths[1], rows.slots[1] = rows.inputs[0], 48, 5
    assert_equal(rows.prefill({1: 70}, fresh=False)[1], expected[48:70])
    assert_equal(rows.decode({1: 0})[1], expected[70:71])


@pytest.mark.parametrize(("page_size", "max_drafts"), [(1, 0), (1, 3), (2, 7), (4, 1), (16, 3)])
def test_the_protocol(page_size: int, max_drafts: int) -> None:
    """Drafts right and wrong, steps without, steps made twice, folds to the same slot and to another."""
    choose = random.Random(0)
    rows = RecurrentRows(small(), num_rows=3, num_tokens=120, page_size=page_size, max_drafts=max_drafts)
    expected = [rows.expected(row) for row in range(3)]
    rows.prefill({0: 1, 1: 5, 2: 40})
    spare = 4
    while min(rows.lengths) < 60:
        going = [row for row in range(3) if rows.lengths[row] < 118 - max_drafts and choose.random() < 0.8]
        if not going:
            continue
        before = rows.slots.clone()
        rows.fold({going[0]: spare})
        if int(rows.slots[going[0]]) != int(before[going[0]]):
            spare = int(before[going[0]])
        drafts = {row: choose.randint(0, max_drafts) for row in going}
        wrong = {row: choose.randint(0, count) for row, count in drafts.items()}
        at = list(rows.lengths)
        found = rows.decode(drafts, wrong, padding=choose.randint(0, 2), attempts=choose.randint(1, 2))
        for row, out in found.items():
            assert_equal(out, expected[row][0][at[row] : rows.lengths[row]])
    for row in range(3):
        assert_equal(rows.pool.layer(0).states[rows.slots[row]], expected[row][1][rows.borders[row]])


@pytest.mark.parametrize("decay", [-30.0, 6.0])  # of log -> e^g near 1, and g near -20 and less
@pytest.mark.parametrize("beta", [-60.0, 60.0])
def test_extreme_gates_and_zero_vectors(decay: float, beta: float) -> None:
    rows = RecurrentRows(small(), num_rows=2, num_tokens=90)
    rows.layers[0] = replace(rows.layers[0], a_log=torch.full((4,), 0.0).double())
    for x in rows.inputs:
        x[:, -4:], x[:, -8:-4] = decay * 3, beta
        x[10:20, : rows.config.conv_channels] = 0
        x[15:, : rows.config.conv_channels] *= 1e-3
    expected = [rows.expected(row)[0] for row in range(2)]
    found = rows.prefill({0: 80, 1: 7})
    assert_equal(found[0], expected[0][:80])
    assert_equal(found[1], expected[1][:7])
    for _ in range(20):
        rows.fold()
        assert_equal(rows.decode({1: 0})[1][0], expected[1][rows.lengths[1] - 1])


def test_layers_alike_are_folded_at_once() -> None:
    rows = RecurrentRows(small(3, 32, 8, width=3), num_rows=2, num_tokens=60, num_layers=3)
    rows.prefill({0: 30, 1: 17})
    for _ in range(20):
        rows.fold()
        rows.decode({0: 0, 1: 0})
    for layer in range(3):
        for row in range(2):
            states = rows.expected(row, layer)[1]
            assert_equal(rows.pool.layer(layer).states[rows.slots[row]], states[rows.borders[row]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_formats_of_models(dtype: torch.dtype) -> None:
    rows = RecurrentRows(small(), num_tokens=90, max_drafts=2, dtype=dtype, state_dtype=torch.float32)
    expected = [rows.expected(row)[0] for row in range(3)]
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    for row, out in rows.prefill({0: 66, 1: 1, 2: 31}).items():
        torch.testing.assert_close(out, expected[row][: rows.lengths[row]], rtol=bound, atol=bound)
    for drafts in (0, 2, 1, 2, 0):
        rows.fold()
        at = list(rows.lengths)
        for row, out in rows.decode({0: drafts, 2: 0}).items():
            torch.testing.assert_close(out, expected[row][at[row] : rows.lengths[row]], rtol=bound, atol=bound)
