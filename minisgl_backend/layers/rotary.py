"""The table of rotary position embedding (Su et al., 2021), with the two ways of stretching it that are served."""

from __future__ import annotations

import math

import torch


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Radians a position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def llama3_frequencies(
    frequencies: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> torch.Tensor:
    """Llama 3.1's stretch: waves longer than the original context are slowed by `factor`, short ones stay,
    and those between (`original_max_position` / high_freq_factor to / low_freq_factor) are blended."""
    waves_in_context = original_max_position * frequencies / (2 * math.pi)
    blend = (waves_in_context - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / factor


def yarn_frequencies(
    frequencies: torch.Tensor,
    *,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position: int,
    truncate: bool = True,
) -> torch.Tensor:
    """YaRN's stretch (Peng et al., 2023): pairs that turn more than beta_fast times in the original context stay,
    those that turn less than beta_slow times are slowed by `factor`, and a ramp over the pairs joins the two."""
    num_pairs = len(frequencies)

    def pair_with_turns(turns: float) -> float:
        return num_pairs * math.log(original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed) + frequencies / factor * slowed


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's temperature, which multiplies cosines and sines."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def rotary_table(
    frequencies: torch.Tensor, max_position: int, device: torch.device, attention_factor: float = 1.0
) -> torch.Tensor:
    """float32 [max_position, head_dim] on `device`: cosines of the head_dim / 2 angles, then sines."""
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(attention_factor)
