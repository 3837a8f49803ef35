"""How checkpoints name and store the tensors of a model, as data. Needs no torch: families write it.

This project's names are those of Llama's checkpoints (model.layers.0.self_attn.q_proj.weight), with all experts of a
layer in one tensor each: mlp.experts.gate_proj.weight, [num_experts, intermediate_size, hidden_size].
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One or more tensors of this project that a checkpoint has under another name, in one tensor, or in another order.

    Names are relative to the layer (or to the model, outside of layers). Without a suffix they stand for `.weight`,
    `.bias` and whatever else a number format stores of a weight (`.weight_scale`), which the checkpoint's name gets as
    well.
    """

    name: str  # in the checkpoint; with {expert} in it, each expert has a tensor of its own
    of: tuple[str, ...]  # this project's, whose outputs follow one another in it
    interleaved: bool = False  # the outputs of those in `of` take turns instead
    transposed: bool = False  # [inputs, outputs]
    either_way: bool = False  # some checkpoints have it so, and others not: its shape tells
    one_row: bool = False  # a vector, stored as [1, size]
    # As many groups follow one another, each with an equal part of the outputs of every one in `of`: those of a head.
    groups: int = 1
    may_be_absent: bool = False  # some checkpoints have those in `of` under their own names instead


# As in Qwen's mixtures: every expert has its own tensors.
_EXPERTS = tuple(
    Stored(name=f"mlp.experts.{{expert}}.{kind}_proj", of=(f"mlp.experts.{kind}_proj",))
    for kind in ("gate", "up", "down")
)


# Of all experts together, as transformers 5 saves some; other files have each expert's tensors.
MERGED_EXPERTS = (
    Stored(
        name="mlp.experts.gate_up_proj",
        of=("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
        may_be_absent=True,
    ),
    Stored(name="mlp.experts.down_proj", of=("mlp.experts.down_proj.weight",), may_be_absent=True),
)

# As DeepSeek's mixtures have the MLP that every token takes.
SHARED_EXPERTS = tuple(
    Stored(name=f"mlp.shared_experts.{kind}_proj", of=(f"mlp.shared_expert.{kind}_proj",))
    for kind in ("gate", "up", "down")
)


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How one family's checkpoints differ from this project's names."""

    stored: tuple[Stored, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()  # what names begin with there, and here
    left_out: tuple[str, ...] = ()  # what names of tensors begin with that are not used: of encoders, of draft layers
    within: str = ""  # what names of tensors begin with that are its own: the others are of another model

    def find(self, name: str, found: Container[str] | None = None) -> tuple[Stored, str, str] | None:
        """How a tensor with this project's full name is stored: with the prefix of its layer, and the suffix that its
        `Stored` leaves open. None: under its own name, as it is. found: the names of a checkpoint, with this project's
        prefixes; None: any."""
        match = _LAYER.fullmatch(name)
        layer, local = (match[1], match[2]) if match else ("", name)
        module, dot, kind = local.rpartition(".")
        for stored in (*self.stored, *_EXPERTS):
            for base, suffix in ((local, ""), (module, dot + kind)):
                if base in stored.of and not (
                    stored.may_be_absent and found is not None and f"{layer}{stored.name}{suffix}" not in found
                ):
                    return stored, layer, suffix
        return None

    def here(self, name: str) -> str:
        """A checkpoint's name with this project's prefix."""
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name
