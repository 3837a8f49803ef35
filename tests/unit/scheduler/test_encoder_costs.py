"""What slices of the encoder cost: in sum what the image does, however they are cut, and never more than is allowed."""

from __future__ import annotations

import dataclasses

import pytest

from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.layers.encoder_config import TransformerConfig
from minisgl_backend.request import Content
from minisgl_backend.scheduler.encoder_costs import EncoderCosts

LIMITS = EncoderLimits(
    num_layers=4, capacity=1, vector_bytes=1, state_bytes=1, patch_area=16, patch_cost=0.5, pair_cost=0.01,
    begin_cost=0.1, plane_cost=0.2, part_patches=10, window=4, full_layers=(1,), plane_layers=(0, 2),
)  # fmt: skip
CALLS = ((1.0, 0.1), (1.5, 0.15), (3.0, 0.3))  # two parts at once are cheaper than one and one
LARGE = Content(start=0, length=1, digest=b"large", shape=(1, 20, 44, 3))  # 55 patches, six parts a layer
SMALL = Content(start=0, length=1, digest=b"small", shape=(1, 8, 12, 3))  # six patches


@pytest.mark.parametrize("calls", [(), CALLS])
@pytest.mark.parametrize("image", [LARGE, SMALL])
def test_a_slice_costs_what_is_allowed_at_most(calls: tuple[tuple[float, float], ...], image: Content) -> None:
    costs, units = EncoderCosts(LIMITS, calls), LIMITS.num_units(image)
    every, whole = costs.most(image, 0, 1e9)
    assert every == units
    for budget in (0.0, 1.0, 7.5, 20.0, 50.0, whole):
        at, spent = 0, 0.0
        while at < units:
            count, cost = costs.most(image, at, budget)
            assert cost <= budget
            if not count:
                count, cost = 1, costs.of_one(image, at)
                assert cost > budget, "it would have fitted"
            elif at + count < units:
                assert cost + costs.of_one(image, at + count) > budget or calls, "there is room for another one"
            at, spent = at + count, spent + cost
        assert spent >= whole - 1e-6


def test_costs_follow_operations_where_calls_were_not_timed() -> None:
    costs = EncoderCosts(LIMITS)
    layers = 4 * 55 * 0.5 + 55 * 0.01 * (4 + 55 + 4 + 4)
    assert costs.most(LARGE, 0, 1e9)[1] == pytest.approx(layers + 55 * 0.1 + 3 * 55 * 0.2)
    assert costs.of_one(LARGE, 1) == pytest.approx(10 * (0.5 + 0.01 * 4))
    assert costs.of_one(LARGE, 6) == pytest.approx(10 * (0.5 + 0.01 * 55))
    assert costs.of_one(LARGE, 5) == pytest.approx(10 * (0.5 + 0.01 * 4) + 55 * 0.2), "a plane follows"
    tower = dataclasses.replace(LIMITS, part_patches=0, window=None, num_layers=1, plane_layers=(), plane_cost=0.0)
    assert EncoderCosts(tower).most(LARGE, 0, 1e9) == (1, pytest.approx(55 * (0.5 + 0.55 + 0.1)))


def test_costs_are_those_of_timed_calls() -> None:
    costs = EncoderCosts(LIMITS, CALLS)
    assert costs.most(LARGE, 1, 2.2) == (2, pytest.approx(1.5 + 4 * 0.15))
    assert costs.most(LARGE, 6, 1 + 5.5) == (1, pytest.approx(1 + 5.5)), "a layer that sees the whole image"
    assert costs.of_one(SMALL, 1) == pytest.approx(0.6 * (1 + 6 * 0.1)), "as much of a part as it is"


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_images_that_are_timed_are_whole_blocks(merge: int) -> None:
    config = TransformerConfig(
        out_size=8, hidden_size=16, num_layers=2, patch_size=14, merge=merge, intermediate_size=16, num_heads=2,
        activation="gelu",
    )  # fmt: skip
    for count, (tiles, *sides, channels) in zip((16, 32), config.timed_shapes(), strict=True):
        assert (tiles, channels) == (1, 3)
        assert all(side % (14 * merge) == 0 for side in sides)
        assert sides[0] * sides[1] / 14**2 == pytest.approx(count * config.part_patches, rel=0.1)
