"""What each layer of a model computes, as data: families write it (models/families), layers are built from it.

Needs neither torch nor transformers, so that a model folder is read and refused in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from minisgl_backend.kernels.moe.router_config import RouterConfig as RouterConfig
from minisgl_backend.layers.mixer_config import MixerConfig, NormConfig, check_divides

# Activations of the gate; gelu_tanh is transformers' gelu_pytorch_tanh, swiglu_oai clamps the up half too (`gate_mul`).
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
# relu2: relu(x) ** 2 (So et al., 2021: Primer); xielu has two learned parameters (Huang and Schlag, 2024: Deriving
# Activation Functions Using Integration).
UngatedActivation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]
Norms = Literal["before", "after", "both", "parallel"]  # see `LayerConfig.norms`


@dataclass(frozen=True, kw_only=True)
class DenseMlpConfig:
    """An MLP whose weights every token uses."""

    module: ClassVar[str]  # MODULE:CLASS that runs it
    num_projections: ClassVar[int]

    intermediate_size: int
    bias: bool = False  # of all projections

    def rows_per_token(self) -> int:
        """Weight rows of hidden_size numbers that one token uses."""
        return self.num_projections * self.intermediate_size

    def check_tp(self, size: int) -> None:
        """Raises ConfigError unless it splits over `size` ranks."""
        check_divides(size, "intermediate_size", self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class MlpConfig(DenseMlpConfig):
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    module: ClassVar[str] = "minisgl_backend.layers.mlp:GatedMLP"
    num_projections: ClassVar[int] = 3
    activation: Activation = "silu"


@dataclass(frozen=True, kw_only=True)
class UngatedMlpConfig(DenseMlpConfig):
    """The MLP without a gate: down(activation(up(x)))."""

    module: ClassVar[str] = "minisgl_backend.layers.mlp:UngatedMLP"
    num_projections: ClassVar[int] = 2
    activation: UngatedActivation


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: the router picks `experts_per_token` of `num_experts` gated MLPs for each token."""

    module: ClassVar[str] = "minisgl_backend.layers.moe:MoeMLP"

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    router: RouterConfig
    activation: Activation = "silu"
    bias: bool = False  # of gate, up and down of every expert (gpt-oss)
    shared_intermediate_size: int = 0  # of the shared expert; 0: there is none
    shared_gate: bool = False  # its output is multiplied by sigmoid(gate(x)), one number per token (Qwen2-MoE)

    def rows_per_token(self) -> int:
        """As of `DenseMlpConfig`."""
        experts = 3 * self.intermediate_size * self.experts_per_token + self.num_experts
        return experts + 3 * self.shared_intermediate_size + self.shared_gate

    def check_tp(self, size: int) -> None:
        """As of `DenseMlpConfig`."""
        check_divides(size, "moe_intermediate_size", self.intermediate_size)
        check_divides(size, "shared_expert_intermediate_size", self.shared_intermediate_size)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: a mixer of tokens, then an MLP, each added to the residual stream; or both in parallel."""

    mixer: MixerConfig
    mlp: DenseMlpConfig | MoeConfig
    norm: NormConfig
    # Which norms mixer and MLP have: of their input, their output, or both; "parallel": one norm whose output is
    # the input of both (Wang and Komatsuzaki, 2021: GPT-J).
    norms: Norms = "before"
    residual_multiplier: float = 1.0  # of the outputs of mixer and MLP (Granite)
    layer_scalar: bool = False  # a stored number multiplies the residual stream after the layer (Gemma 4)

    def with_mixer(self, **changes: Any) -> LayerConfig:
        """The same with these fields of the mixer."""
        return replace(self, mixer=replace(self.mixer, **changes))  # type: ignore[type-var]  # a dataclass
