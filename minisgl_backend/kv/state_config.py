"""The recurrent state of a layer, as data. Needs neither torch nor NumPy: configs of layers name it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """What a layer of the gated delta rule keeps of a row: a state [k_dim, v_dim] for each value head, which reads key
    head `value head // (num_v_heads // num_k_heads)`, and the last inputs of its causal convolution. Of the whole
    model, or of one rank's share."""

    num_k_heads: int
    num_v_heads: int  # a multiple of num_k_heads
    k_dim: int
    v_dim: int
    conv_width: int  # inputs that the convolution sees, its own included

    @property
    def conv_channels(self) -> int:
        """Inputs of a token that the convolution runs over: those of queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def num_inputs(self) -> int:
        """All inputs of a token: [q | k | v | z | b | a], of which z is as wide as v, and b and a have a number for
        each value head."""
        return self.conv_channels + self.num_v_heads * (self.v_dim + 2)

    def share(self, tp_size: int) -> StateConfig:
        """Of one of `tp_size` ranks, which split the heads evenly."""
        return replace(self, num_k_heads=self.num_k_heads // tp_size, num_v_heads=self.num_v_heads // tp_size)
