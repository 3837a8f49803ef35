"""The tables by which kernels are chosen, walked without any device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.attention.choose import SPLITS, DecodeKey, decode_shape, rotation_pays, split_kv
from minisgl_backend.kernels.candidate import Candidate, Chooser
from minisgl_backend.kernels.device_facts import NAMED, DeviceFacts, shared_memory_of
from minisgl_backend.kernels.linear import choose as linear
from minisgl_backend.kernels.linear.call import LinearKey
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.int4.served import layouts_on
from minisgl_backend.kernels.moe import choose as moe
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.number_formats import WEIGHT_FORMATS

H200 = DeviceFacts.named("h200")
DEVICES = [*NAMED.values(), replace(H200, own_kernels=False), DeviceFacts.cpu(), DeviceFacts.cpu(own_kernels=False)]
BF16 = torch.bfloat16
ROWS = (1, 8, 64, 256, 4096)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.name} {device.own_kernels}")
def test_every_key_has_a_kernel_that_its_device_can_run(device: DeviceFacts) -> None:
    on_gpu = device.kind == "cuda" and device.own_kernels
    allowed = {"torch"} | ({"int_mm"} if device.kind == "cuda" else set())
    allowed |= {"cpu", "cpu_widened", "cpu_blocks"} if device.kind == "cpu" and device.own_kernels else set()
    for weight_format in linear.CANDIDATES:
        chooser = LinearChooser(weight_format, device)
        for rows, size_out, size_in, dtype, flags in itertools.product(
            (0, 1, 5, 16, 64, 65, 9000), (40, 2048, 34816, 151936), (64, 1000, 17408), (BF16, torch.float32),
            itertools.product((False, True), repeat=4),
        ):  # fmt: skip
            norm, bias, residual, touches = flags
            for activation in (None, "silu", "swiglu_oai"):
                key = LinearKey(rows, size_out, size_in, dtype, norm, bias, residual, activation, touches)
                kernel = chooser.kernel(key)
                assert on_gpu or kernel in allowed, key
                contenders = chooser.contenders(key)
                assert not contenders or (len(contenders) > 1 and contenders[0] == kernel), key
    for weight_format in moe.CANDIDATES:
        experts = experts_chooser(weight_format, device)
        for tokens, num_experts, dtype in itertools.product((1, 2, 64, 65, 9000), (8, 300), (BF16, torch.float32)):
            for routed, o_proj_inputs in ((False, 0), (True, 0), (True, 4096)):
                key = ExpertsKey(tokens, num_experts, 4, 2880, 2880, dtype, routed, o_proj_inputs)
                assert on_gpu or experts.kernel(key) in allowed, key


# Products of one layer, and the kernels for each of ROWS on an H200: as they were measured inside of whole steps.
PRODUCTS = {
    "0.6B qkv": ((4096, 1024), {"norm": True}, "small small torch torch torch"),
    "0.6B o": ((1024, 2048), {"residual": True}, "small small small torch torch"),
    "0.6B gate_up": ((6144, 1024), {"norm": True, "activation": "silu"}, "small small torch torch torch"),
    "0.6B down": ((1024, 3072), {"residual": True}, "small small small torch torch"),
    "0.6B lm_head": ((151936, 1024), {}, "lt lt lt lt lt"),
    "14B qkv": ((7168, 5120), {"norm": True}, "small lt lt lt lt"),
    "14B o": ((5120, 5120), {"residual": True}, "small small lt lt lt"),
    "14B gate_up": ((34816, 5120), {"norm": True, "activation": "silu"}, "small lt lt lt lt"),
    "14B down": ((5120, 17408), {"residual": True}, "small small lt lt lt"),
    "14B lm_head": ((151936, 5120), {}, "small lt lt lt lt"),
    "32B/2 qkv": ((5120, 5120), {}, "small long lt lt lt"),
    "32B/2 o": ((5120, 4096), {}, "small lt lt lt lt"),
    "32B/2 gate_up": ((25600, 5120), {"activation": "silu"}, "small small small lt lt"),
    "32B/2 down": ((5120, 12800), {}, "small long lt lt lt"),
    "30B qkv": ((5120, 2048), {"norm": True}, "small small lt lt lt"),
    "gpt-oss qkv": ((5120, 2880), {"bias": True, "norm": True}, "small torch torch torch torch"),
}
SHORT = {"small_rows": "small", "long_rows": "long", "cublaslt": "lt"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_which_kernel_multiplies(name: str) -> None:
    shape, more, expected = PRODUCTS[name]
    chooser = LinearChooser("plain", H200)
    found = [chooser.kernel(LinearKey(rows, *shape, BF16, **more)) for rows in ROWS]
    assert " ".join(SHORT.get(kernel, kernel) for kernel in found) == expected


@pytest.mark.parametrize(
    ("weight_format", "device", "more", "expected"),
    [
        ("fp8", "h200", {}, "fp8_few_rows fp8_few_rows fp8_few_rows scaled_mm scaled_mm"),
        (
            "fp8",
            "h200",
            {"block": (128, 128)},
            "fp8_few_rows fp8_few_rows fp8_few_rows scaled_mm_blocks scaled_mm_blocks",
        ),
        ("fp8", "h200", {"block": (64, 128)}, "fp8_few_rows fp8_few_rows fp8_few_rows fp8_many_rows fp8_many_rows"),
        ("fp8", "l40s", {}, "fp8_few_rows fp8_few_rows fp8_few_rows fp8_many_rows fp8_many_rows"),
        ("int4", "a100", {}, "int4_few_rows int4_few_rows int4_few_rows int4_dequantized int4_dequantized"),
        ("int4", "h100", {}, "int4_few_rows int4_few_rows int4_many_rows int4_dequantized int4_dequantized"),
        ("int4", "h100", {"repacked": "marlin"}, "int4_few_rows int4_few_rows marlin marlin int4_dequantized"),
        (
            "int4",
            "h100",
            {"repacked": "machete"},
            "int4_few_rows int4_few_rows machete_128x64 machete_128x128 int4_dequantized",
        ),
        ("int8", "a100", {}, "int_mm int_mm int_mm int_mm int_mm"),
    ],
)
def test_which_kernel_multiplies_with_other_formats(
    weight_format: str, device: str, more: dict[str, Any], expected: str
) -> None:
    chooser = LinearChooser(weight_format, DeviceFacts.named(device))
    assert " ".join(chooser.kernel(LinearKey(rows, 7168, 5120, BF16, **more)) for rows in ROWS) == expected


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((5120, 2048), (128, 128), True), ((2048, 4096), (128, 128), True), ((5120, 17408), None, True),
        ((5120, 5120), None, True), ((7168, 5120), None, False), ((34816, 5120), None, False),
        ((5120, 2048), (128, 48), False),
    ],
)  # fmt: skip
def test_which_fp8_weights_have_a_kernel_for_one_row(
    shape: tuple[int, int], block: tuple[int, int] | None, expected: bool
) -> None:
    chooser = LinearChooser("fp8", H200)
    assert (chooser.kernel(LinearKey(1, *shape, BF16, block=block)) == "fp8_one_row") == expected
    assert chooser.kernel(LinearKey(2, *shape, BF16, block=block)) == "fp8_few_rows"


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "normed", "expected"),
    [
        *((rows, 12800, 5120, False, True) for rows in (1, 3, 16, 32, 33, 64)),  # a shard of Qwen3-32B
        (65, 12800, 5120, False, False),
        (33, 17408, 5120, False, False),  # more tiles than run at once
        (33, 7168, 10240, False, False),  # too few of them
        (8, 12800, 5120, True, False),  # the norm would be inside
        (8, 25600, 5120, True, False),
        (8, 8704, 5120, False, False),
        (8, 3072, 1024, True, True),
        (9, 3072, 1024, True, False),
    ],
)
def test_which_gated_products_are_small(rows: int, size_out: int, size_in: int, normed: bool, expected: bool) -> None:
    key = LinearKey(rows, 2 * size_out, size_in, BF16, norm=normed, activation="silu")
    assert (LinearChooser("plain", H200).kernel(key) == "small_rows") == expected


SGL = "scaled_mm sgl_scaled_mm"
SGL_BLOCKS = "scaled_mm_blocks sgl_scaled_mm_blocks"


@pytest.mark.parametrize(
    ("weight_format", "device", "more", "contending"),
    [
        ("plain", "h100", {}, {}),  # inside chains of kernels other ones win than alone
        ("plain", "h100", {"activation": "silu"}, {}),
        ("fp8", "h100", {}, {64: f"fp8_few_rows {SGL}", 256: SGL, 4096: SGL}),
        (
            "fp8",
            "h100",
            {"block": (128, 128)},
            {64: f"fp8_few_rows {SGL_BLOCKS}", 256: SGL_BLOCKS, 4096: SGL_BLOCKS},
        ),
        (
            "fp8",
            "h100",
            {"residual": True},
            dict.fromkeys((256, 4096), f"{SGL} fp8_cublaslt") | {64: f"fp8_few_rows {SGL} fp8_cublaslt"},
        ),
        ("fp8", "h100", {"block": (64, 128)}, {}),
        ("fp8", "l40s", {}, dict.fromkeys((256, 4096), "fp8_many_rows sgl_scaled_mm")),
        ("int4", "h100", {}, {}),
        ("int4", "h100", {"activation": "silu"}, {256: "int4_few_rows int4_dequantized"}),
        (
            "int4",
            "h100",
            {"activation": "silu", "repacked": "machete"},
            {
                64: "machete_128x64 int4_many_rows machete_128x32 machete_256x64",
                256: "machete_128x128 machete_256x128 machete_128x256",
                4096: "int4_dequantized machete_128x128 machete_256x128 machete_128x256",
            },
        ),
        ("int8", "a100", {}, dict.fromkeys(ROWS, "int_mm sgl_int8")),
    ],
)
def test_which_kernels_are_so_close_that_they_are_measured(
    weight_format: str, device: str, more: dict[str, Any], contending: dict[int, str]
) -> None:
    chooser = LinearChooser(weight_format, DeviceFacts.named(device))
    found = {rows: " ".join(chooser.contenders(LinearKey(rows, 7168, 5120, BF16, **more))) for rows in ROWS}
    assert {rows: kernels for rows, kernels in found.items() if kernels} == contending


def test_every_weight_format_has_rows() -> None:
    assert set(WEIGHT_FORMATS) <= {*linear.CANDIDATES, *moe.CANDIDATES}


def test_what_a_device_lacks_is_not_chosen() -> None:
    long, wide = LinearKey(8, 5120, 12800, BF16), ExpertsKey(4096, 128, 8, 2048, 768, BF16)
    for name, device in NAMED.items():
        is_hopper = name in ("h100", "h200")
        assert (LinearChooser("plain", device).kernel(long) == "long_rows") == is_hopper
        assert (experts_chooser("plain", device).kernel(wide) == "grouped_tma") == is_hopper
    patient = replace(H200, dependent_launch=False)
    assert LinearChooser("plain", patient).kernel(long) == "cublaslt"
    twice = LinearKey(64, 7168, 5120, BF16, repacked="marlin")
    assert LinearChooser("int4", replace(H200, libraries=frozenset())).kernel(twice) == "int4_many_rows"


def test_rows_that_marlin_multiplies() -> None:
    chooser = LinearChooser("int4", H200)
    for rows, expected in ((16, False), (17, True), (64, True), (128, True), (129, True), (256, True), (257, False)):
        for activation in (None, "silu"):
            key = LinearKey(rows, 7168, 5120, BF16, activation=activation, repacked="marlin")
            assert (chooser.kernel(key) == "marlin") == expected
            rival = "int4_many_rows" if rows <= 128 else "int4_dequantized"  # this weight is not large
            assert chooser.contenders(key) == (("marlin", rival) if 17 <= rows <= 256 else ())


def test_rows_that_machete_multiplies() -> None:
    """Every row count has one first tile, which contends; dequantizing does where it may be faster."""
    chooser = LinearChooser("int4", H200)
    for rows in (*range(1, 300), 512, 513, 2048, 2049, 4096, 4097):
        for shape in ((4096, 4096), (5120, 5120), (7168, 5120), (34816, 5120), (5120, 17408), (16384, 16384)):
            key = LinearKey(rows, *shape, BF16, repacked="machete")
            contenders = chooser.contenders(key)
            assert chooser.kernel(key).startswith("machete") == (17 <= rows <= 2048)
            assert len(contenders) == (0 if rows < 17 or rows > 4096 else len({*contenders}))
            assert ("int4_dequantized" in contenders) == (257 <= rows <= 4096)


def test_which_second_layouts_a_device_has() -> None:
    assert {name: layouts_on(facts) for name, facts in NAMED.items()} == {
        **dict.fromkeys(("h100", "h200"), ("machete", "marlin")),
        **dict.fromkeys(("a100", "l40s"), ("marlin",)),
    }
    assert layouts_on(replace(H200, libraries=frozenset())) == layouts_on(DeviceFacts.cpu()) == ()


def test_a_result_that_lies_elsewhere() -> None:
    """Rows of the result are apart, or it is in another GPU's memory."""
    chooser = LinearChooser("plain", H200)
    assert chooser.kernel(LinearKey(1, 37984, 5120, BF16, into=True)) == "small_rows"
    assert chooser.kernel(LinearKey(1, 75968, 5120, BF16, into=True)) == "cublaslt"
    assert chooser.kernel(LinearKey(8, 5120, 12800, BF16, into=True)) == "cublaslt"


@pytest.mark.parametrize(
    ("tokens", "more", "expected"),
    [
        (1, {"routed": True, "o_proj_inputs": 4096}, "early_router"),
        (1, {"routed": True, "o_proj_inputs": 16384}, "grouped"),
        (1, {"routed": True}, "one_token"),
        (2, {"routed": True}, "few_tokens"),
        (64, {"routed": True}, "few_tokens"),
        (65, {"routed": True}, "grouped"),
        (1, {"routed": True, "unit_stride": False}, "grouped"),
        (1, {}, "grouped"),
        (768, {}, "grouped"),  # 48 pairs an expert
        (769, {}, "grouped_tma"),
        (769, {"aligned": False}, "grouped"),
    ],
)
def test_which_kernels_compute_experts(tokens: int, more: dict[str, int], expected: str) -> None:
    key = ExpertsKey(tokens, 128, 8, 2048, 768, BF16, **more)
    assert experts_chooser("plain", H200).kernel(key) == expected


@pytest.mark.parametrize(
    ("tokens", "block", "expected"),
    [
        (1, (128, 128), "early_router"),
        (2, (128, 128), "few_quantized"),
        (32, (128, 128), "few_quantized"),
        (16, None, "few_tokens"),
        (16, (128, 16), "few_tokens"),  # too few inputs for a step in FP8
        (33, (128, 128), "grouped"),
        (4096, (128, 128), "sgl_grouped"),
        (4096, (64, 128), "grouped"),
        (1, (128, 192), "grouped"),  # no whole blocks in a tile
        (4096, None, "grouped"),
    ],
)
def test_experts_in_fp8(tokens: int, block: tuple[int, int] | None, expected: str) -> None:
    blocks = frozenset() if block is None else frozenset({block})
    key = ExpertsKey(tokens, 128, 8, 2048, 768, BF16, True, 4096 if tokens == 1 else 0, blocks=blocks)
    assert experts_chooser("fp8", H200).kernel(key) == expected
    assert experts_chooser("fp8", replace(H200, libraries=frozenset())).kernel(key) != "sgl_grouped"


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "group", "can_share", "workers", "num_splits", "tile"),
    [
        (1, 8, 5, True, 0, 32, 64),
        (8, 8, 5, True, 0, 4, 64),
        (20, 8, 5, True, 3 * 132 // 8, 4, 64),
        (32, 8, 5, True, 2 * 132 // 8, 4, 64),
        (32, 8, 2, True, 3 * 132 // 8, 4, 64),
        (32, 8, 2, False, 0, 4, 32),
        (32, 8, 8, False, 0, 4, 64),
        (64, 8, 5, True, 4 * 132 // 8, 4, 32),
        (256, 8, 5, True, 0, 4, 64),
    ],
)
def test_how_decode_attention_is_cut(
    batch: int, num_kv_heads: int, group: int, can_share: bool, workers: int, num_splits: int, tile: int
) -> None:
    shape = decode_shape(batch, num_kv_heads, group, 132, can_share)
    assert (shape.workers, shape.num_splits, shape.tile) == (workers, num_splits, tile)
    assert rotation_pays(batch, num_kv_heads) == (batch < 50)


def test_wide_heads_are_cut_otherwise() -> None:
    """Of eight sequences more warps share a tile; of many tiles are shorter, so that three programs fit."""
    for batch, tile, warps in ((1, 64, 8), (8, 64, 8), (64, 32, 4), (256, 32, 4)):
        shape = decode_shape(batch, 4, 4, head_dim=256)
        assert (shape.tile, shape.num_warps, shape.num_stages) == (tile, warps, 3)
        assert decode_shape(batch, 4, 4, head_dim=64) == decode_shape(batch, 4, 4)


def test_every_cut_serves_some_batch() -> None:
    keys = (
        DecodeKey(batch, num_kv_heads, group, 132, can_share)
        for batch in range(1, 300)
        for num_kv_heads in (1, 4, 8)
        for group in (1, 4, 8)
        for can_share in (True, False)
    )
    assert {split_kv(key) for key in keys} == set(SPLITS)


def test_a_choice_is_made_once() -> None:
    asked: list[int] = []

    def serves(key: int, facts: DeviceFacts) -> bool:
        asked.append(key)
        return key < 2

    rows = (Candidate("few", "", serves), Candidate[int]("many", "", lambda key, facts: True))
    chooser = Chooser[int]({"plain": rows}, "plain", H200)
    assert [chooser.kernel(key) for key in (1, 2, 1, 2)] == ["few", "many", "few", "many"]
    assert asked == [1, 2]


def test_devices_by_name() -> None:
    assert DeviceFacts.of(torch.device("cpu")).kind == "cpu"
    with pytest.raises(ConfigError, match="device_facts is 'tpu'; allowed: h100, h200, a100, l40s"):
        DeviceFacts.named("tpu")
    assert [shared_memory_of(capability) >> 10 for capability in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 1))] == [
        163, 99, 227, 227, 99,
    ]  # fmt: skip
