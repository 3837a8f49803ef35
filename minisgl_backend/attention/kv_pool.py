"""Keys and values of all layers, in pages.

The layout is that of `attention.base`: [num_pages, num_kv_heads, page_size, head_dim] for K and for V of a layer.
"""

from __future__ import annotations

import torch

from minisgl_backend.attention.base import AttentionSpec


def max_pages(page_size: int) -> int:
    """Pages that a pool can have: a slot is an int32, and one page more is the padding page."""
    return (2**31 - 1) // page_size - 1


class KVPool:
    """`num_pages` pages with the ids 1 to num_pages, and page 0, the padding page, which no sequence owns."""

    def __init__(self, spec: AttentionSpec, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_size = spec.page_size
        shape = (spec.num_layers, 2, num_pages + 1, spec.num_kv_heads, spec.page_size, spec.head_dim)
        # Zeros, not garbage, which may hold what is no number: kernels of other packages may read a last page whole.
        storage = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._layers = [(layer[0], layer[1]) for layer in storage]

    @staticmethod
    def bytes_per_page(spec: AttentionSpec) -> int:
        """Device memory of one page, all layers, keys and values."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.page_size * spec.head_dim * spec.dtype.itemsize

    def k(self, layer_index: int) -> torch.Tensor:
        """Keys of one layer, [num_pages + 1, num_kv_heads, page_size, head_dim]."""
        return self._layers[layer_index][0]

    def v(self, layer_index: int) -> torch.Tensor:
        """Values of one layer, [num_pages + 1, num_kv_heads, page_size, head_dim]."""
        return self._layers[layer_index][1]

    def store(self, layer_index: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes k and v, both [num_tokens, num_kv_heads, head_dim], to slots int [num_tokens]."""
        pages = torch.div(slots, self.page_size, rounding_mode="floor")
        offsets = slots - pages * self.page_size
        self.k(layer_index)[pages, :, offsets] = k
        self.v(layer_index)[pages, :, offsets] = v
