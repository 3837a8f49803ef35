"""The gated short convolution (Liquid AI, 2025: LFM2), as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from minisgl_backend.layers.mixer_config import MixerConfig, RopeConfig, check_divides


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(MixerConfig):
    """out(C * conv(B * x)), where B, C and x are projections of a token, and conv is a causal convolution over the
    last `width` tokens of each channel by itself."""

    module: ClassVar[str] = "minisgl_backend.layers.short_conv:ShortConv"
    name: ClassVar[str] = "conv"
    rope: RopeConfig | None = field(default=None, init=False)
    channels: int
    width: int  # tokens, its own included
    bias: bool = False  # of both projections and of the convolution

    @property
    def ends_with_pages(self) -> bool:
        return True

    def ring_length(self, max_drafts: int) -> int:
        """Vectors that a page keeps of its last tokens: those before a token and its own, and its drafts', none of
        which may take the place of what another token of the step reads."""
        return self.width + max_drafts

    def num_weights(self, hidden_size: int) -> int:
        return 4 * self.channels * hidden_size + self.channels * self.width

    def check_tp(self, size: int) -> None:
        check_divides(size, "hidden_size", self.channels)
