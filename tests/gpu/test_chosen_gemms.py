"""Products by chosen cuBLASLt algorithms against float64, under graphs, with and without a residual."""

from __future__ import annotations

import json

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
ROWS = (1, 8, 24, 64, 136, 192, 256)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.double() - ref).norm() / ref.norm()).item()


def weights_of(size_out: int, size_in: int, dtype: torch.dtype, count: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(size_out)
    return [(torch.randn(size_out, size_in, device="cuda") / size_in**0.5).to(dtype) for _ in range(count)]


@pytest.fixture(scope="module")
def lt():
    from minisgl_backend.kernels.linear.plain.cublaslt import CublasLt

    return CublasLt(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size_out", "size_in"), [(5120, 2048), (1024, 3072), (6144, 1000)])
def test_every_candidate_is_right(lt, size_out, size_in, dtype):
    from minisgl_backend.kernels.linear.plain.cublaslt import Gemm
    from minisgl_backend.kernels.linear.plain.tuned import candidates

    (weight,) = weights_of(size_out, size_in, dtype, 1)
    for rows in (16, 136, 256):
        x = torch.randn(rows, size_in, device="cuda").to(dtype)
        residual = torch.randn(rows, size_out, device="cuda").to(dtype)
        gemm = Gemm(lt, rows, size_out, size_in, dtype)
        found = candidates(gemm, 132)
        assert len(found) > 8
        for algorithm in found:
            launch = gemm.launcher(algorithm)
            out = torch.full_like(residual, float("nan"))
            launch(weight, x, out, False)
            ref = x.double() @ weight.double().t()
            assert relative(out, ref) < 8e-3
            added = residual.clone()
            launch(weight, x, added, True)
            assert relative(added, ref + residual.double()) < 8e-3


def test_choices_are_measured_once_and_then_read(tmp_path):
    from minisgl_backend.kernels.linear.plain.tuned import TunedLinear

    weights = weights_of(34816, 1024, torch.bfloat16)
    path = tmp_path / "deep" / "gemms.json"
    first = TunedLinear(DEVICE, path)
    first.tune(weights, ROWS)
    ((name, choices),) = json.loads(path.read_text()).items()
    assert name.endswith("torch.bfloat16 34816x1024")
    assert sorted(map(int, choices)) == [16, 32, 64, 144, 192, 256]
    path.write_text(json.dumps({name: dict.fromkeys(choices, "")}))
    second = TunedLinear(DEVICE, path)
    second.tune(weights, ROWS)
    x = torch.randn(64, 1024, device="cuda").bfloat16()
    assert second.linear(x, weights[0]) is None  # the file says that torch is best everywhere


def test_an_algorithm_of_another_library_is_not_used(tmp_path):
    from minisgl_backend.kernels.linear.plain.tuned import TunedLinear

    weights = weights_of(34816, 1024, torch.bfloat16)
    path = tmp_path / "gemms.json"
    TunedLinear(DEVICE, path).tune(weights, [64])
    (name,) = json.loads(path.read_text())
    path.write_text(json.dumps({name: {"64": "ff" * 64}}))
    tuned = TunedLinear(DEVICE, path)
    tuned.tune(weights, [64])
    assert tuned.linear(torch.randn(64, 1024, device="cuda").bfloat16(), weights[0]) is None


def test_ops_use_the_choices_under_graphs_and_outside(tmp_path, monkeypatch):
    from minisgl_backend.kernels.triton_ops import TritonOps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ops = PlainKernels(GemmDevice(TritonOps(DEVICE), DEVICE))
    down, gate_up = weights_of(5120, 8192, torch.bfloat16), weights_of(16384, 5120, torch.bfloat16)
    ops.prepare(down, ROWS, 4096)
    ops.prepare(gate_up, ROWS, 4096)
    chosen = json.loads((tmp_path / "minisgl" / "gemms.json").read_text())
    assert sum(bool(algorithm) for choices in chosen.values() for algorithm in choices.values()) > 2
    for rows in (72, 136, 192, 200, 256, 512, 2000, 3100, 4000):
        x = torch.randn(rows, 5120, device="cuda").bfloat16()
        residual = torch.randn(rows, 5120, device="cuda").bfloat16()
        kept = residual.clone()

        def step(x=x, residual=residual):
            return ops.linear(
                ops.linear(x, gate_up[1], GemmCall(activation="silu")), down[1], GemmCall(residual=residual)
            )

        gate, up = (x.double() @ gate_up[1].double().t()).chunk(2, 1)
        ref = (torch.nn.functional.silu(gate) * up) @ down[1].double().t() + kept.double()
        assert relative(step(), ref) < 8e-3
        residual.copy_(kept)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
        for _ in range(3):
            residual.copy_(kept)
            graph.replay()
            torch.cuda.synchronize()
            assert relative(out, ref) < 8e-3


def test_results_whose_rows_are_apart(tmp_path, monkeypatch):
    """As ranks write their columns of logits: of 151,936 tokens the second half begins at a multiple of 128 bytes."""
    from minisgl_backend.kernels.triton_ops import TritonOps

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ops, size_out, size_in = PlainKernels(GemmDevice(TritonOps(DEVICE), DEVICE)), 75968, 1024
    weights = weights_of(size_out, size_in, torch.bfloat16)
    ops.prepare(weights, ROWS)
    for rows in ROWS:
        x = torch.randn(rows, size_in, device="cuda").bfloat16()
        ref = x.double() @ weights[1].double().t()
        for start in (0, size_out, 1):  # no algorithm writes 16 bytes at a time at an address that is a multiple of 2
            wide = torch.full((rows, 2 * size_out + 128), 7.0, device="cuda", dtype=torch.bfloat16)
            ops.linear(x, weights[1], GemmCall(out=wide[:, start : start + size_out]))
            assert relative(wide[:, start : start + size_out], ref) < 8e-3
            assert bool((wide[:, :start] == 7).all())
            assert bool((wide[:, start + size_out :] == 7).all())


def test_what_cannot_be_tuned_is_left_to_torch(tmp_path):
    from minisgl_backend.kernels.linear.plain.tuned import TunedLinear

    tuned = TunedLinear(DEVICE, tmp_path / "gemms.json")
    for weights in ([torch.randn(4096, 1024, device="cuda")], weights_of(4100, 1024, torch.bfloat16)):
        tuned.tune(weights, ROWS)
        x = torch.randn(64, 1024, device="cuda", dtype=weights[0].dtype)
        assert tuned.linear(x, weights[0]) is None
    weights = weights_of(34816, 1024, torch.bfloat16)
    tuned.tune(weights, [192])
    wide = torch.randn(192, 2048, device="cuda").bfloat16()
    assert tuned.linear(wide[:, :1024], weights[0]) is None
    assert tuned.linear(torch.randn(300, 1024, device="cuda").bfloat16(), weights[0]) is None
