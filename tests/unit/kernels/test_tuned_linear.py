"""What the choice of cuBLASLt algorithms does without a GPU: tile numbers, their ranking, the file of choices."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from minisgl_backend.kernels.linear.plain import tuned as tuned_linear
from minisgl_backend.kernels.linear.plain.cublaslt import CLUSTERS, ScaledGemm, tile_sizes
from minisgl_backend.kernels.linear.plain.tuned import (
    LONG_CLUSTERS,
    LONG_TILES,
    PROMPT_ROWS,
    TunedLinear,
    candidates,
    measured_rows,
    predicted_us,
    prompt_rows,
)
from minisgl_backend.kernels.linear.tuning.choices_file import ChoicesFile

ALGORITHM = "42" + "0f" * 63


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (1, (8, 8)), (15, (64, 64)), (35, (256, 32)), (36, (8, 128)), (46, (8, 768)), (47, (16, 64)), (165, (112, 128)),
        (201, (176, 128)), (312, (64, 16)), (392, (64, 760)), (393, (128, 8)), (439, (128, 448)), (447, (128, 512)),
        (448, (192, 8)), (485, (192, 336)), (513, (256, 256)), (555, (384, 168)), (600, (576, 112)), (630, (768, 80)),
    ],
)  # fmt: skip
def test_tiles_are_numbered_as_in_the_header_of_cuda_13(number, size):
    assert tile_sizes()[number] == size


def test_each_tile_size_has_one_number():
    sizes = list(tile_sizes().values())
    assert len(set(sizes)) == len(sizes) == 630


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "winner"),
    [
        (256, 34816, 5120, (176, 128)), (192, 34816, 5120, (88, 192)), (192, 5120, 17408, (128, 64)),
        (192, 7168, 5120, (176, 64)), (128, 5120, 17408, (88, 64)), (64, 5120, 17408, (48, 64)),
    ],
)  # fmt: skip
def test_tiles_that_won_on_an_h200_rank_high(rows, size_out, size_in, winner):
    sizes = sorted(tile_sizes().values(), key=lambda tile: predicted_us(rows, size_out, size_in, tile, 132))
    assert sizes.index(winner) < 12


class TiledGemm:
    """Has kernels for one cluster of half of the tiles, and counts what it is asked."""

    rows, size_out, size_in = 192, 34816, 5120

    def __init__(self) -> None:
        self.asked = 0

    def suggestions(self, most: int) -> list[bytes]:
        return [b"a", b"b"]

    def tiles(self, algorithm: bytes) -> list[int]:
        return [*tile_sizes(), 10_000]

    def with_tile(self, algorithm: bytes, tile: int, cluster: int) -> bytes | None:
        self.asked += 1
        return b"%d/%d" % (tile, cluster) if tile % 2 == 0 and cluster != CLUSTERS[0] else None


def test_candidates_are_the_suggestions_and_the_likeliest_tiles_that_there_are_kernels_for():
    gemm = TiledGemm()
    found = candidates(gemm, 132)
    sizes = sorted(tile_sizes(), key=lambda tile: predicted_us(192, 34816, 5120, tile_sizes()[tile], 132))
    tiles = [tile for tile in sizes if tile % 2 == 0][:12]
    assert found == [b"a", b"b", *(b"%d/%d" % (tile, cluster) for tile in tiles for cluster in CLUSTERS[1:3])]
    assert gemm.asked <= 3 * 12 + 4 * sizes.index(tiles[-1])


class LongProduct(TiledGemm):
    rows = 4096


def test_candidates_of_a_prompt_are_the_suggestions_and_tiles_that_take_little_power():
    sizes = {size: tile for tile, size in tile_sizes().items()}
    tiles = sorted(tile for size in LONG_TILES if (tile := sizes[size]) % 2 == 0)
    assert tiles
    expected = [b"a", b"b", *(b"%d/%d" % (tile, cluster) for tile in tiles for cluster in LONG_CLUSTERS)]
    assert candidates(LongProduct(), 132) == expected


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        (1, 16), (16, 16), (17, 32), (1919, 1920), (1920, 2048), (2176, 2048), (2177, 0), (2880, 3072), (3840, 4096),
        (5000, 0), (8192, 8192), (8704, 8192), (9000, 0), (100_000, 0),
    ],
)  # fmt: skip
def test_a_choice_serves_near_numbers_of_rows(rows, measured):
    assert measured_rows(rows) == measured


ANY = re.compile(".*")


def test_what_is_remembered_grows_by_gemms(tmp_path: Path):
    file = ChoicesFile(tmp_path / "new" / "gemms.json")
    assert file.read("a", ANY) == {}
    file.add("a", {"16": ALGORITHM})
    file.add("b", {"16": ""})
    file.add("a", {"32": "scaled_mm"})
    file.add("c", {})
    assert file.read("a", ANY) == {"16": ALGORITHM, "32": "scaled_mm"}
    assert file.read("a", tuned_linear._ALGORITHM) == {"16": ALGORITHM}
    assert remembered(tmp_path / "new" / "gemms.json").keys() == {"a", "b"}
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["gemms.json"]


def remembered(path: Path) -> dict[str, dict[str, str]]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', json.dumps({"a": ["b"]}), "[" * 100_000])
def test_a_broken_file_is_an_empty_one(tmp_path: Path, content: str):
    path = tmp_path / "gemms.json"
    path.write_text(content)
    assert ChoicesFile(path).read("a", ANY) == {}
    ChoicesFile(path).add("a", {"16": ALGORITHM})
    assert remembered(path) == {"a": {"16": ALGORITHM}}


def test_choices_that_are_none_are_measured_again(tmp_path: Path):
    path = tmp_path / "gemms.json"
    path.write_text(json.dumps({"a": {"16": ALGORITHM, "32": 5, "48": "abc", "64": "ab" * 65, "80": ["a"], "96": ""}}))
    assert ChoicesFile(path).read("a", tuned_linear._ALGORITHM) == {"16": ALGORITHM, "96": ""}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    ChoicesFile(tmp_path / "file" / "gemms.json").add("a", {"16": ""})
    assert ChoicesFile(None).read("a", ANY) == {}
    ChoicesFile(None).add("a", {"16": ""})


def test_gemms_that_were_not_tuned_are_left_to_the_caller():
    tuned = TunedLinear(torch.device("cpu"), None)
    tuned.tune([torch.zeros(16, 16)], [8])  # four bytes a number: nothing to choose
    assert tuned.linear(torch.zeros(8, 16), torch.zeros(16, 16)) is None


class FakeGemm:
    """A library with three algorithms, the fastest of them wrong, whose GEMMs are torch's own."""

    refuses = False

    def __init__(
        self, lt: object, rows: int, size_out: int, size_in: int, dtype: torch.dtype, stride: int | None = None
    ) -> None:
        self.rows, self.size_out, self.size_in = rows, size_out, size_in

    def suggestions(self, most: int) -> list[bytes]:
        return [SLOW, WRONG, RIGHT]

    def tiles(self, algorithm: bytes) -> list[int]:
        return []

    def allows(self, algorithm: bytes) -> bool:
        return True

    def out_alignment(self, algorithm: bytes) -> int:
        return 16

    def launcher(self, algorithm: bytes) -> Callable[..., None]:
        def launch(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if self.refuses:
                raise RuntimeError("cublasLtMatmul returned status 15")
            result = x @ weight.t() * (2 if algorithm == WRONG else 1)
            out.copy_(out + result if add else result)

        launch.algorithm = algorithm
        return launch


SLOW, WRONG, RIGHT = (letter * 64 for letter in (b"s", b"w", b"r"))


class FakeTimed:
    """Microseconds by algorithm, torch's 10."""

    times: ClassVar[dict[bytes | None, float]] = {WRONG: 1.0, RIGHT: 7.0, SLOW: 9.0, None: 10.0}
    count = 0

    def __init__(self, calls: list[functools.partial[None]]) -> None:
        FakeTimed.count += 1
        self.first = self.median = self.times[getattr(calls[0].func, "algorithm", None)]

    def again(self) -> None:
        pass


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library and the device replaced by the processor."""
    nothing = contextlib.nullcontext()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("get_device_name", "CPU"), ("Stream", stream), ("current_stream", stream), ("device", nothing),
        ("stream", nothing), ("synchronize", None), ("empty_cache", None),
        ("get_device_properties", SimpleNamespace(multi_processor_count=132)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(tuned_linear, "CublasLt", lambda device: SimpleNamespace(version=1))
    monkeypatch.setattr(tuned_linear, "Gemm", FakeGemm)
    monkeypatch.setattr(tuned_linear, "GraphTimer", FakeTimed)
    monkeypatch.setattr(tuned_linear, "_is_plain", lambda tensor: tensor.is_contiguous())
    monkeypatch.setattr(FakeGemm, "refuses", False)
    FakeTimed.count = 0


def two_weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8192, 1024).bfloat16() for _ in range(2)]


@pytest.mark.usefixtures("on_cpu")
def test_the_fastest_right_algorithm_is_chosen_used_and_remembered(tmp_path: Path):
    weights, path = two_weights(), tmp_path / "gemms.json"
    tuned = TunedLinear(torch.device("cpu"), path)
    tuned.tune(weights, [1, 8, 24])
    assert remembered(path) == {"CPU cublasLt 1 torch.bfloat16 8192x1024": dict.fromkeys(("16", "32"), RIGHT.hex())}
    measured = FakeTimed.count
    x, residual = torch.randn(24, 1024).bfloat16(), torch.randn(24, 8192).bfloat16()
    expected = x @ weights[1].t()
    assert torch.equal(tuned.linear(x, weights[1]), expected)
    added = tuned.linear(x, weights[1], residual.clone())
    assert torch.equal(added, residual + expected)
    assert tuned.linear(torch.randn(40, 1024).bfloat16(), weights[1]) is None  # no such row count was asked for
    assert tuned.linear(torch.randn(24, 2048).bfloat16()[:, :1024], weights[1]) is None
    again = TunedLinear(torch.device("cpu"), path)
    again.tune(weights, [8, 24])
    assert torch.equal(again.linear(x, weights[0]), x @ weights[0].t())
    assert FakeTimed.count == measured


@pytest.mark.usefixtures("on_cpu")
def test_a_result_whose_rows_are_apart_is_written_where_the_algorithm_can():
    weights = two_weights()
    tuned = TunedLinear(torch.device("cpu"), None)
    x, wide = torch.randn(8, 1024).bfloat16(), torch.zeros(8, 16384 + 64).bfloat16()
    columns = wide[:, 64 : 64 + 8192]
    assert not tuned.linear_into(x, weights[0], columns)  # before anything is chosen
    tuned.tune(weights, [8])
    assert tuned.linear_into(x, weights[0], columns)
    assert torch.equal(columns, x @ weights[0].t())
    assert not wide[:, :64].any()
    assert not wide[:, 64 + 8192 :].any()
    assert not tuned.linear_into(x, weights[0], wide[:, 1 : 1 + 8192])  # addresses are multiples of 2 alone
    assert not tuned.linear_into(x, weights[0], torch.zeros(8, 8193).bfloat16()[:, :8192])
    assert tuned.linear_into(x[:1], weights[0], torch.zeros(1, 8200).bfloat16()[:, :8192])  # one row has no distance
    assert not tuned.linear_into(x, weights[0], torch.zeros(8192, 8).bfloat16().t())


@pytest.mark.usefixtures("on_cpu")
def test_torch_keeps_what_gains_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights, path = two_weights(), tmp_path / "gemms.json"
    monkeypatch.setattr(FakeTimed, "times", {WRONG: 1.0, RIGHT: 9.9, SLOW: 11.0, None: 10.0})
    tuned = TunedLinear(torch.device("cpu"), path)
    tuned.tune(weights, [8])
    assert list(remembered(path).values()) == [{"16": ""}]
    assert tuned.linear(torch.randn(8, 1024).bfloat16(), weights[0]) is None


@pytest.mark.parametrize(
    ("longest", "sizes"),
    [
        (0, []),
        (496, []),
        (497, [512]),
        (1919, [512, 1024]),
        (1920, [512, 1024, 2048]),
        (8192, list(PROMPT_ROWS[:-1])),
        (16384, list(PROMPT_ROWS)),
    ],
)
def test_rows_of_prompts_that_are_measured(longest: int, sizes: list[int]):
    assert prompt_rows(longest) == sizes


@pytest.mark.usefixtures("on_cpu")
def test_one_size_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights, path = two_weights(), tmp_path / "gemms.json"

    def few_rows(self: FakeGemm, most: int) -> list[bytes]:
        if self.rows > 16:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        return [RIGHT]

    monkeypatch.setattr(FakeGemm, "suggestions", few_rows)
    tuned = TunedLinear(torch.device("cpu"), path)
    tuned.tune(weights, [8, 24])
    assert list(remembered(path).values()) == [{"16": RIGHT.hex()}]
    assert tuned.linear(torch.randn(8, 1024).bfloat16(), weights[0]) is not None
    assert tuned.linear(torch.randn(24, 1024).bfloat16(), weights[0]) is None


@pytest.mark.usefixtures("on_cpu")
def test_what_fails_while_it_is_measured_is_left_to_torch_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights, path = two_weights(), tmp_path / "gemms.json"
    tuned = TunedLinear(torch.device("cpu"), path)

    def out_of_memory(*_: object) -> list[bytes]:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(FakeGemm, "suggestions", out_of_memory)
        tuned.tune(weights, [8])
    with monkeypatch.context() as patch:
        patch.setattr(FakeGemm, "suggestions", lambda self, most: [WRONG])  # all of them are wrong
        tuned.tune(weights, [8])
    assert not path.exists()
    assert tuned.linear(torch.randn(8, 1024).bfloat16(), weights[0]) is None
    tuned.tune(weights, [8])
    assert tuned.linear(torch.randn(8, 1024).bfloat16(), weights[0]) is not None


@pytest.mark.usefixtures("on_cpu")
def test_a_launch_that_the_library_refuses_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    weights = two_weights()
    tuned = TunedLinear(torch.device("cpu"), None)
    tuned.tune(weights, [8])
    x = torch.randn(8, 1024).bfloat16()
    monkeypatch.setattr(FakeGemm, "refuses", True)
    assert tuned.linear(x, weights[0]) is None
    monkeypatch.setattr(FakeGemm, "refuses", False)
    assert tuned.linear(x, weights[0]) is None  # it is not tried for each layer of each step


@pytest.mark.usefixtures("on_cpu")
def test_where_the_library_is_missing_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def missing(device: torch.device) -> object:
        raise OSError("libcublasLt.so.: cannot open shared object file")

    monkeypatch.setattr(tuned_linear, "CublasLt", missing)
    tuned = TunedLinear(torch.device("cpu"), None)
    for _ in range(3):
        tuned.tune(two_weights(), [8])
    assert len(caplog.records) == 1
    assert tuned.linear(torch.randn(8, 1024).bfloat16(), two_weights()[0]) is None


class FakeLibrary:
    """Notes what is asked of it; `algorithms` says how many it suggests."""

    algorithms = 1

    def __init__(self) -> None:
        self.library, self.handle, self.preference, self.set = self, None, None, []

    def __getattr__(self, name: str):
        return lambda *given: 0

    def call(self, name: str, *given: object) -> None:
        if name == "cublasLtMatmulDescSetAttribute":
            self.set.append((given[1], given[2]._obj.value))
        if name == "cublasLtMatmulAlgoGetHeuristic":
            given[-1]._obj.value = self.algorithms


def test_a_gemm_with_scales_tells_the_library_where_they_are(monkeypatch: pytest.MonkeyPatch):
    launched = []
    monkeypatch.setattr(ScaledGemm, "launcher", lambda self, algorithm: lambda *given: launched.append(given))
    lt = FakeLibrary()
    gemm = ScaledGemm(lt, 8, 32, 16, torch.bfloat16, True)
    weight, x, out = (torch.zeros(4), torch.zeros(3)), (torch.zeros(4), torch.zeros(3)), torch.zeros(1)
    for _ in range(2):
        gemm.add_to(out, weight, x)
    pointers = [(17, weight[1].data_ptr()), (18, x[1].data_ptr())]
    assert lt.set == [(3, 1), (31, 5), (32, 4), *pointers, *pointers]
    assert launched == [(weight[0], x[0], out, True)] * 2
    lt.algorithms = 0
    with pytest.raises(RuntimeError, match="no algorithm for 32 x 16"):
        ScaledGemm(lt, 8, 32, 16, torch.bfloat16, False).add_to(out, weight, x)
