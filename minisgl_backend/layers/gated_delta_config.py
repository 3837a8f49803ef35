"""The gated delta rule as a layer's mixer, as data. Needs neither torch nor transformers, as `layers.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.state_config import StateConfig
from minisgl_backend.layers.mixer_config import MixerConfig, NormConfig, RopeConfig, check_divides


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(MixerConfig):
    """The gated delta rule (Yang et al., 2024) behind a short causal convolution: a state for each value head in place
    of keys and values (Gated DeltaNet)."""

    module: ClassVar[str] = "minisgl_backend.layers.gated_delta:GatedDelta"
    name: ClassVar[str] = "linear_attn"

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int  # tokens that the convolution sees, its own included
    norm: NormConfig  # of each value head's output
    rope: RopeConfig | None = field(default=None, init=False)
    beta_scale: float = 1.0  # of beta; 2: the state may have negative eigenvalues (OLMo hybrid)

    @property
    def ends_with_pages(self) -> bool:
        return True

    @property
    def state(self) -> StateConfig:
        return StateConfig(
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv_width=self.conv_width,
        )

    def num_weights(self, hidden_size: int) -> int:
        return (self.state.num_inputs + self.num_v_heads * self.v_dim) * hidden_size

    def check(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ConfigError(
                f"config.json: linear_num_value_heads is {self.num_v_heads}; allowed: a multiple of "
                f"linear_num_key_heads ({self.num_k_heads})"
            )

    def check_tp(self, size: int) -> None:
        check_divides(size, "linear_num_key_heads", self.num_k_heads)
