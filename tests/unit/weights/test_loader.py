"""Tensors that a checkpoint stores in its own way get to their parameters, on every rank, each element once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.loader import load_weights, plan_reads
from minisgl_backend.weights.names import Stored, TensorNames
from minisgl_backend.weights.parts import WeightPart, check_filled

CPU = torch.device("cpu")
PREFIX = "model.layers.3."
EXPERTS, INTERMEDIATE, HIDDEN = 3, 4, 6


def load(folder: Path, tensors: dict[str, torch.Tensor], parts: list[WeightPart], names: TensorNames) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    load_weights(
        parts, names, Checkpoint(folder, names), CPU, lambda done, total: None, model="X", is_redundant=lambda _: False
    )


def part(name: str, whole: torch.Tensor, rank: int, ranks: int, dim: int = 0, **more: float) -> WeightPart:
    size = whole.shape[dim] // ranks
    shape = [size if axis == dim else length for axis, length in enumerate(whole.shape)]
    experts = whole.dim() == 3 or (whole.dim() == 2 and ".experts." in name)
    return WeightPart(
        name=PREFIX + name, shape=tuple(whole.shape), target=torch.full(shape, torch.nan), dim=dim, start=rank * size,
        experts=experts, **more,
    )  # fmt: skip


def expected(whole: torch.Tensor, one: WeightPart) -> torch.Tensor:
    return whole.narrow(one.dim, one.start, one.target.shape[one.dim])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_merged_outputs(rank: int, suffix: str, tmp_path: Path) -> None:
    names = TensorNames(stored=(Stored(name="attn.qkv", of=("attn.q", "attn.k", "attn.v")),))
    shape = (HIDDEN,) if suffix == "weight" else ()
    wholes = [torch.randn(size, *shape) for size in (8, 4, 4)]
    parts = [part(f"attn.{n}.{suffix}", whole, rank, 2) for n, whole in zip("qkv", wholes, strict=True)]
    load(tmp_path, {f"{PREFIX}attn.qkv.{suffix}": torch.cat(wholes)}, parts, names)
    for one, whole in zip(parts, wholes, strict=True):
        assert torch.equal(one.target, expected(whole, one))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_outputs_in_groups(ranks: int, suffix: str, tmp_path: Path) -> None:
    """Of each head what belongs to it, as Qwen3-Next has queries, keys, and the values of two value heads."""
    heads, sizes, shape = 4, (3, 3, 10), (HIDDEN,) if suffix == "weight" else ()
    names = TensorNames(stored=(Stored(name="attn.qkv", of=("attn.q", "attn.k", "attn.v"), groups=heads),))
    wholes = [torch.randn(heads * size, *shape) for size in sizes]
    by_head = torch.cat([whole.unflatten(0, (heads, -1)) for whole in wholes], 1).flatten(0, 1)
    for rank in range(ranks):
        parts = [part(f"attn.{n}.{suffix}", whole, rank, ranks) for n, whole in zip("qkv", wholes, strict=True)]
        load(tmp_path, {f"{PREFIX}attn.qkv.{suffix}": by_head}, parts, names)
        for one, whole in zip(parts, wholes, strict=True):
            assert torch.equal(one.target, expected(whole, one))


@pytest.mark.parametrize("is_merged", [False, True])
def test_what_some_checkpoints_have_merged(is_merged: bool, tmp_path: Path) -> None:
    names = TensorNames(stored=(Stored(name="attn.qk", of=("attn.q", "attn.k"), may_be_absent=True),))
    wholes = {name: torch.randn(8, HIDDEN) for name in "qk"}
    tensors = {f"{PREFIX}attn.{name}.weight": whole for name, whole in wholes.items()}
    if is_merged:
        tensors = {f"{PREFIX}attn.qk.weight": torch.cat(list(wholes.values()))}
    parts = [part(f"attn.{name}.weight", whole, 1, 2) for name, whole in wholes.items()]
    load(tmp_path, tensors, parts, names)
    for one, whole in zip(parts, wholes.values(), strict=True):
        assert torch.equal(one.target, expected(whole, one))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_stacks_of_experts(rank: int, transposed: bool, interleaved: bool, tmp_path: Path) -> None:
    """gpt-oss: gate and up by turns, inputs first; Llama 4: one after the other, inputs first."""
    names = TensorNames(
        stored=(
            Stored(
                name="mlp.experts.gate_up",
                of=("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
                interleaved=interleaved,
                transposed=transposed,
            ),
            Stored(
                name="mlp.experts.gate_up_bias",
                of=("mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"),
                interleaved=interleaved,
                transposed=transposed,
            ),
            Stored(name="mlp.experts.down", of=("mlp.experts.down_proj.weight",), transposed=transposed),
        )
    )
    gate, up = torch.randn(2, EXPERTS, INTERMEDIATE, HIDDEN)
    gate_bias, up_bias = torch.randn(2, EXPERTS, INTERMEDIATE)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)

    def together(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack([one, other], 2).flatten(1, 2) if interleaved else torch.cat([one, other], 1)

    gate_up = together(gate, up)
    tensors = {
        f"{PREFIX}mlp.experts.gate_up": gate_up.transpose(1, 2) if transposed else gate_up,
        f"{PREFIX}mlp.experts.gate_up_bias": together(gate_bias, up_bias),
        f"{PREFIX}mlp.experts.down": down.transpose(1, 2) if transposed else down,
    }
    wholes = {"gate_proj.weight": gate, "up_proj.weight": up, "gate_proj.bias": gate_bias, "up_proj.bias": up_bias}
    parts = [part(f"mlp.experts.{name}", whole, rank, 2, 1) for name, whole in wholes.items()]
    parts.append(part("mlp.experts.down_proj.weight", down, rank, 2, 2))
    load(tmp_path, tensors, parts, names)
    for one, whole in zip(parts, [*wholes.values(), down], strict=True):
        assert torch.equal(one.target, expected(whole, one)), one.name


def test_one_tensor_an_expert(tmp_path: Path) -> None:
    names = TensorNames(stored=(Stored(name="moe.experts.{expert}.w1", of=("mlp.experts.gate_proj",)),))
    gate = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN)
    one = part("mlp.experts.gate_proj.weight", gate, 1, 2, 1)
    load(tmp_path, {f"{PREFIX}moe.experts.{e}.w1.weight": gate[e] for e in range(EXPERTS)}, [one], names)
    assert torch.equal(one.target, expected(gate, one))


def test_two_parts_of_one_tensor_and_a_constant(tmp_path: Path) -> None:
    whole = torch.randn(4, HIDDEN)
    parts = [part("norm.weight", whole, 0, 1), part("norm.weight", whole, 1, 2, add=1.0)]
    load(tmp_path, {f"{PREFIX}norm.weight": whole}, parts, TensorNames())
    assert torch.equal(parts[0].target, whole)
    assert torch.equal(parts[1].target, whole[2:] + 1)


def test_other_prefixes_and_what_is_left_out(tmp_path: Path) -> None:
    whole = torch.randn(4)
    one = part("norm.weight", whole, 0, 1)
    tensors = {f"text.{PREFIX}norm.weight": whole, "vision.patch.weight": torch.zeros(2)}
    names = TensorNames(prefixes=(("text.model.", "model."),))
    with pytest.raises(ConfigError, match=r"has 1 tensors .* does not have: vision\.patch\.weight"):
        load(tmp_path, tensors, [one], names)
    load(tmp_path, tensors, [one], TensorNames(prefixes=names.prefixes, left_out=("vision.",)))
    assert torch.equal(one.target, whole)


def test_a_merged_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    names = TensorNames(stored=(Stored(name="attn.kv", of=("attn.k", "attn.v")),))
    parts = [part(f"attn.{name}.weight", torch.zeros(4, HIDDEN), 0, 1) for name in "kv"]
    with pytest.raises(ConfigError, match=r"attn\.kv\.weight has shape \(9, 6\); config.json makes it \(8, 6\)"):
        load(tmp_path, {f"{PREFIX}attn.kv.weight": torch.zeros(9, HIDDEN)}, parts, names)


def test_parts_that_disagree_about_a_tensor() -> None:
    with pytest.raises(ValueError, match="two parts of it make it"):
        plan_reads([part("a", torch.zeros(4, size), 0, 1) for size in (2, 3)], TensorNames())


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([slice(0, 2), slice(2, 4)], None),
        ([slice(0, 3), slice(2, 4)], "weight: elements 4 to 6 are filled twice"),
        ([slice(0, 1), slice(2, 4)], "weight: elements 2 to 4 are not filled"),
        ([slice(0, 2)], "weight: elements 4 to 8 are not filled"),
        ([], "weight: elements 0 to 8 are not filled"),
    ],
)
@pytest.mark.parametrize("columns", [False, True])
def test_every_element_is_filled_once(pieces: list[slice], error: str | None, columns: bool) -> None:
    weight = torch.empty(2, 4) if columns else torch.empty(4, 2)
    views = [weight[:, piece] if columns else weight[piece] for piece in pieces]
    parts = [WeightPart(name="x", shape=tuple(view.shape), target=view) for view in views]
    if error is None:
        check_filled(parts, [("weight", weight)])
    else:
        with pytest.raises(ValueError, match="weight: elements" if columns else error):
            check_filled(parts, [("weight", weight)])
