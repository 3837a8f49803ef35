"""4-bit weights as a config describes them and a file has them: layouts that go by other names, orders of inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.select import select_kernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.int4 import Int4Factory
from minisgl_backend.weights.int4_checkpoint import groups_in_order
from minisgl_backend.weights.layer import WeightedLayer
from minisgl_backend.weights.loader import load_weights
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.quantization_config import read_quantization_config
from minisgl_backend.weights.schemes.int4 import Int4Scheme
from tests.parity.int4_files import GROUP, VARIANTS, Numbers, Variant, stored

CPU, EXPERTS = torch.device("cpu"), "model.layers.0.mlp.experts"
INPUTS, OUTPUTS = 4 * GROUP, 2 * GROUP
ORDERS = {"ct": "weight_g_idx", "gptq": "g_idx"}


def _factory(layout: str) -> Int4Factory:
    layout_name: Any = "gptq" if layout == "gptq" else "pack-quantized"
    scheme = Int4Scheme(
        layout=layout_name, group=GROUP, symmetric=True, act_order=True, unread=("weight_shape", "qzeros")
    )
    plain = select_kernels(TorchOps(), CPU)
    return Int4Factory(plain, torch.float32, CPU, scheme)


def _tensors(layout: str, name: str, numbers: Numbers, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = stored(numbers, VARIANTS[layout])
    tensors.pop(ORDERS[layout], None)
    if order is not None:
        tensors[ORDERS[layout]] = order.clone()
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}


def _load(method: WeightedLayer, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")
    names, done = TensorNames(), []
    load_weights(
        method.weight_parts(), names, Checkpoint(folder, names), CPU, lambda *now: done.append(now), model="X",
        is_redundant=lambda name: name.endswith(("weight_shape", "qzeros", "g_idx")),
    )  # fmt: skip
    assert done[-1][0] == done[-1][1]


def _weight(size_out: int, size_in: int, seed: int) -> torch.Tensor:
    return torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", ["ct", "gptq"])
@pytest.mark.parametrize("said", ["nothing", "minus one", "in order"])
def test_a_file_without_an_order_has_none(said: str, layout: str, tmp_path: Path) -> None:
    numbers = Numbers.of(_weight(OUTPUTS, INPUTS, 0), VARIANTS[layout])
    order = {"minus one": torch.full((INPUTS,), -1, dtype=torch.int32), "in order": groups_in_order(INPUTS, GROUP, CPU)}
    output = LinearOutput(name="one", size=OUTPUTS, start=0, local=OUTPUTS)
    method = _factory(layout).linear(LinearSpec(outputs=(output,), input_size=INPUTS, local_inputs=INPUTS))
    _load(method, _tensors(layout, "one", numbers, order.get(said)), tmp_path)
    method.process_weights_after_loading()
    torch.testing.assert_close(method.dequantized(), numbers.dequantized())


@pytest.mark.parametrize("said", ["nothing", "minus one", "in order", "shuffled"])
def test_experts_are_served_in_order_alone(said: str, tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    wholes = []
    for index, (kind, size_out, size_in) in enumerate(
        (("gate", OUTPUTS, INPUTS), ("up", OUTPUTS, INPUTS), ("down", INPUTS, OUTPUTS))
    ):
        in_order = groups_in_order(size_in, GROUP, CPU)
        order = {"minus one": torch.full_like(in_order, -1), "in order": in_order, "shuffled": in_order.flip(0)}
        for expert in range(2):
            numbers = Numbers.of(_weight(size_out, size_in, 2 * index + expert), VARIANTS["gptq"])
            name = f"{EXPERTS}.{expert}.{kind}_proj"
            tensors |= _tensors("gptq", name, numbers, order.get(said))
            wholes.append(numbers.dequantized())
    method = _factory("gptq").experts(
        ExpertsSpec(
            name=EXPERTS, num_experts=2, experts_per_token=1, hidden_size=INPUTS, intermediate_size=OUTPUTS, start=0,
            local=OUTPUTS, activation="silu", renormalize=True,
        )
    )  # fmt: skip
    if said == "shuffled":
        with pytest.raises(ConfigError, match=r"desc_act is true, and .*experts have their inputs in orders of their"):
            _load(method, tensors, tmp_path)
        return
    _load(method, tensors, tmp_path)
    method.process_weights_after_loading()
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(9))
    for expert in range(2):
        found = method.apply_weights(x, MixtureCall(Picked(torch.full((3, 1), expert), torch.ones(3, 1))))
        gate, up, down = wholes[expert::2]
        expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    numbers = Numbers.of(_weight(OUTPUTS, INPUTS, 0), VARIANTS["ct"])
    output = LinearOutput(name="one", size=OUTPUTS, start=0, local=OUTPUTS)
    method = _factory("ct").linear(LinearSpec(outputs=(output,), input_size=INPUTS, local_inputs=INPUTS))
    order = groups_in_order(INPUTS, 2 * GROUP, CPU)
    with pytest.raises(ConfigError, match=r"one: its inputs are not in groups of 32, as quantization_config says"):
        _load(method, _tensors("ct", "one", numbers, order), tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:gptq"}),
        ("gptq", {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}),
        ("gptq_v2", {"quant_method": "auto-round", "packing_format": "auto_round"}),
        ("gptq_v2", {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}),
        ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
        ("awq", {"quant_method": "awq", "version": "gemm", "provider": "auto-round"}),
        ("gptq", {"quant_method": "gptq", "desc_act": False, "provider": "auto-round"}),
        ("gptq_v2", {"quant_method": "gptq", "method": "gptq", "format": "gptq_v2"}),
    ],
)
def test_layouts_by_other_names(layout: str, said: dict[str, Any], symmetric: bool, tmp_path: Path) -> None:
    said = {**said, "bits": 4, "group_size": GROUP, "sym": symmetric}
    if said["quant_method"] == "awq":
        said["zero_point"] = not symmetric
    [scheme] = read_quantization_config(said, TensorNames()).schemes
    variant = Variant(layout=layout, symmetric=symmetric)
    numbers = Numbers.of(_weight(OUTPUTS, INPUTS, 0), variant)
    output = LinearOutput(name="one", size=OUTPUTS, start=0, local=OUTPUTS)
    spec = LinearSpec(outputs=(output,), input_size=INPUTS, local_inputs=INPUTS)
    method = Int4Factory(select_kernels(TorchOps(), CPU), torch.float32, CPU, scheme.parameters).linear(spec)
    tensors = {f"one.{suffix}": tensor.contiguous() for suffix, tensor in stored(numbers, variant).items()}
    _load(method, tensors, tmp_path)
    method.process_weights_after_loading()
    torch.testing.assert_close(method.dequantized(), numbers.dequantized())
