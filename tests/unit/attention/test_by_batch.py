"""Two backends for decode, by the number of rows and their contexts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minisgl_backend.attention.by_batch import DecodeByBatchBackend
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.latent.reference import TorchLatentBackend
from minisgl_backend.attention.layer import LatentHeads
from minisgl_backend.attention.registry import create_attention
from tests.latents import LatentCase

HEADS = LatentHeads(rank=32, nope_dim=24, rope_dim=8, v_dim=20)


class Captured(TorchLatentBackend):
    """Notes what is captured and replayed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.notes: list[tuple[str, int]] = []

    def allocate_graph(self, max_batch_size: int) -> None:
        self.notes.append(("allocate", max_batch_size))

    def plan_capture(self, inputs: Any) -> Any:
        self.notes.append(("capture", inputs.batch_size))
        return self.plan_decode(inputs)

    def plan_replay(self, inputs: Any) -> None:
        self.notes.append(("replay", inputs.batch_size))

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        return tuple({1, min(4, max_batch)})


@pytest.mark.parametrize(
    ("lengths", "is_few"), [([20], True), ([200], True), ([20, 40], True), ([20, 41], False), ([20, 3, 40], False)]
)
def test_few_rows_with_short_contexts_are_decoded_by_their_own_backend(lengths: list[int], is_few: bool) -> None:
    case = LatentCase(HEADS, 4, lengths, 16)
    attention = create_attention("torch", "torch", case.spec, DecodeByBatch("torch", ((1, math.inf), (2, 30))))
    reference = create_attention("torch", "torch", case.spec)
    inputs, q = case.decode_inputs(), case.queries(len(lengths))
    plan = attention.plan(None, inputs)
    (backend,) = attention.backends[1]
    assert isinstance(backend, DecodeByBatchBackend)
    assert plan.decode is not None
    assert plan.decode[0].backend is (backend._few if is_few else backend._more)
    expected = reference.attend(case.layer, q, reference.plan(None, inputs))
    torch.testing.assert_close(attention.attend(case.layer, q, plan), expected)


def test_each_captured_size_and_range_of_lengths_has_one_backend() -> None:
    case = LatentCase(HEADS, 4, [5, 6, 70], 16)
    few, more = (Captured(case.spec, case.group) for _ in range(2))
    both = DecodeByBatchBackend(few, more, DecodeByBatch("torch", ((1, math.inf), (2, 30))))
    both.allocate_graph(8)
    for lengths in ([5], [5, 6, 7], [5, 70]):
        inputs = LatentCase(HEADS, 4, lengths, 16).decode_inputs()
        both.plan_capture(inputs)
        both.plan_replay(inputs)
    assert few.notes == [("allocate", 2), ("capture", 1), ("replay", 1)]
    assert more.notes == [("allocate", 8), ("capture", 3), ("replay", 3), ("capture", 2), ("replay", 2)]
    assert both.decode_batches(8) == (1, 2, 3, 4), "the first of more than two is another kernel's"
    assert both.decode_batches(1) == (1,)
    assert [both.length_bounds(size) for size in (1, 2, 3)] == [(), (30,), ()]
