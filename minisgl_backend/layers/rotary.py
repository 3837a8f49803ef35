"""The table of rotary position embedding (Su et al., 2021), with the supported methods of context extension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl_backend.layers.mixer_config import AttentionTemperatureTuning, RopeConfig


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Radians per position for each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def llama3_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are scaled by `factor`, short ones are unchanged, and those in between
    (`original_max_position` / high_freq_factor to / low_freq_factor) are interpolated."""
    waves_in_context = rope.original_max_position * frequencies / (2 * math.pi)
    blend = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / rope.factor


def yarn_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN's scaling (Peng et al., 2023): pairs that turn more than beta_fast times in the original context are
    unchanged, those that turn less than beta_slow times are scaled by `factor`, with a linear ramp in between."""
    num_pairs = len(frequencies)

    def pair_with_turns(turns: float) -> float:
        return num_pairs * math.log(rope.original_max_position / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed) + frequencies / rope.factor * slowed


def yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature, which multiplies cosines and sines."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE's temperature, which multiplies cosines and sines."""
    factor = rope.factor
    return math.sqrt(1.0 + math.log(factor) / math.log(rope.original_max_position)) if factor > 1.0 else 1.0


def dynamic_frequencies(head_dim: int, rope: RopeConfig, max_seq_len: int) -> torch.Tensor:
    """Dynamic NTK scaling: the theta grows with the longest sequence, `max_seq_len` tokens, beyond the original
    context."""
    original = rope.original_max_position
    times = rope.factor * max(max_seq_len, original) / original - (rope.factor - 1.0)
    return default_frequencies(head_dim, rope.theta * times ** (head_dim / (head_dim - 2)))


class RopeTable(NamedTuple):
    """Cosines and sines by position."""

    number: int  # in its model
    cos_sin: torch.Tensor  # float32 [max_seq_len, head_dim], as of `rope_table`
    axes: torch.Tensor | None = None  # int64 [head_dim], of RopeConfig.axes; None: tokens have one position

    def of_step(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines of tokens with a position for each axis, int64 [3, num_tokens], one after the other:
        float32 [num_tokens, head_dim]."""
        if self.axes is None:
            return self.cos_sin[positions[0]]
        return self.cos_sin.gather(0, positions[self.axes].T)


def rotary_table(
    frequencies: torch.Tensor, max_position: int, device: torch.device, attention_factor: float = 1.0, still: int = 0
) -> torch.Tensor:
    """float32 [max_position, 2 * (num_frequencies + still)]: cosines of the angles, then sines. `still`: number of
    pairs after the others that are not rotated."""
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    cos, sin = angles.cos().mul_(attention_factor), angles.sin().mul_(attention_factor)
    return torch.cat([F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))], dim=-1)


def rope_table(rope: RopeConfig | None, head_dim: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """float32 [max_seq_len, head_dim] for `Ops.rope_store`. Without `rope` (NoPE) nothing is rotated."""
    if rope is None:
        return rotary_table(torch.empty(0), max_seq_len, device, still=head_dim // 2)
    if rope.type == "proportional":
        frequencies = default_frequencies(head_dim, rope.theta)[: rope.rotated_pairs] / rope.factor
        return rotary_table(frequencies, max_seq_len, device, still=head_dim // 2 - rope.rotated_pairs)
    rotary_dim = rope.rotary_dim or head_dim
    frequencies, attention_factor = _stretched(rope, default_frequencies(rotary_dim, rope.theta), max_seq_len)
    return rotary_table(frequencies, max_seq_len, device, attention_factor, still=(head_dim - rotary_dim) // 2)


class RopeTables:
    """The rope tables of a model: layers with the same rope and head size share one."""

    def __init__(self, max_seq_len: int, device: torch.device) -> None:
        self.max_seq_len = max_seq_len  # tokens
        self._device = device
        self._tables: dict[tuple[RopeConfig | None, int], RopeTable] = {}

    def of(self, rope: RopeConfig | None, head_dim: int) -> RopeTable:
        """See `rope_table`."""
        key = rope, head_dim
        if key not in self._tables:
            cos_sin = rope_table(rope, head_dim, self.max_seq_len, self._device)
            self._tables[key] = RopeTable(len(self._tables), cos_sin, _axes(rope, head_dim, self._device))
        return self._tables[key]

    def __iter__(self) -> Iterator[RopeTable]:
        """By number."""
        return iter(self._tables.values())


def _axes(rope: RopeConfig | None, head_dim: int, device: torch.device) -> torch.Tensor | None:
    if rope is None or not rope.axes:
        return None
    half = [*rope.axes, *[0] * (head_dim // 2 - len(rope.axes))]  # what is not rotated is so by any position
    return torch.tensor(half * 2, dtype=torch.int64, device=device)


def query_temperatures(tuning: AttentionTemperatureTuning, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """float32 [max_seq_len]: factor of the queries at each position."""
    positions = torch.arange(tuning.offset, tuning.offset + max_seq_len, dtype=torch.float32, device=device)
    return positions.div_(tuning.every).floor_().log1p_().mul_(tuning.beta).add_(1.0)


def head_order(rope: RopeConfig | None, head_dim: int) -> tuple[int, ...] | None:
    """The order of the dimensions of query and key heads; None: as in the checkpoint.

    All kernels rotate dimension i with i + head_dim / 2. Scores do not depend on the order, so other pairings (partial,
    interleaved) are permuted to this one when the weights are loaded.
    """
    if rope is None:
        return None
    rotary_dim = rope.rotary_dim or head_dim
    half, still = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pairs = [(2 * i, 2 * i + 1) if rope.interleaved else (i, i + half) for i in range(half)]
    pairs += [(rotary_dim + i, rotary_dim + still + i) for i in range(still)]
    order = (*(first for first, _ in pairs), *(second for _, second in pairs))
    return None if order == tuple(range(head_dim)) else order


def _stretched(rope: RopeConfig, frequencies: torch.Tensor, max_seq_len: int) -> tuple[torch.Tensor, float]:
    """The frequencies for the rope's type, and the factor of cosines and sines."""
    if rope.type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.type == "llama3":
        return llama3_frequencies(frequencies, rope), 1.0
    if rope.type == "yarn":
        return yarn_frequencies(frequencies, rope), rope.attention_factor or yarn_attention_factor(rope)
    if rope.type == "longrope":  # Ding et al., 2024: each pair of dimensions has its own factor
        # The factors are chosen once, not by each sequence's length: keys in the prefix cache are shared.
        factors = rope.long_factor if max_seq_len > rope.original_max_position else rope.short_factor
        factor = rope.attention_factor or longrope_attention_factor(rope)
        return frequencies / torch.tensor(factors, dtype=torch.float32), factor
    if rope.type == "dynamic":
        return dynamic_frequencies(2 * len(frequencies), rope, max_seq_len), 1.0
    return frequencies, 1.0
