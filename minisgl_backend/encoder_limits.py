"""The encoder of images as the scheduler and the runner both count it."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.request import Content


def num_parts(num_patches: int, part_patches: int) -> int:
    """That a layer of an encoder is cut into, for an image of so many patches; part_patches: of `EncoderLimits`."""
    return max(1, -(-num_patches // part_patches)) if part_patches else 1


@dataclass(frozen=True, kw_only=True)
class EncoderLimits:
    """What the scheduler knows of the encoder of images. Costs are in prompt tokens that take as long."""

    num_layers: int
    capacity: int  # bytes of all vectors and begun images
    vector_bytes: int  # of one token's
    state_bytes: int  # of one patch while its image is encoded
    patch_area: int  # pixels
    patch_cost: float  # of a patch in one layer
    pair_cost: float  # of a patch that attends to another one in one layer
    begin_cost: float = 0.0  # of a patch, before the first layer
    plane_cost: float = 0.0  # of a patch that becomes a part of a vector: behind `plane_layers`, and at the end
    context_cost: float = 0.0  # of a prompt token that attends to another one in the decoder
    part_patches: int = 0  # a layer of a larger image is cut into parts of so many patches; 0: it is not
    window: int | None = None  # patches that one attends to; None: its tile
    full_layers: tuple[int, ...] = ()  # attend to the tile even so
    plane_layers: tuple[int, ...] = ()
    num_ranks: int = 1
    bidirectional: bool = False  # an image's tokens see each other: no chunk ends among them

    def seen(self, layer: int, in_tile: int) -> int:
        """Patches that one attends to, in an image of tiles of so many."""
        return in_tile if self.window is None or layer in self.full_layers else min(in_tile, self.window)

    def num_patches(self, content: Content) -> int:
        tiles, height, width, _ = content.shape
        return tiles * height * width // self.patch_area

    def num_units(self, content: Content) -> int:
        """That an image is encoded in, of about the same cost."""
        return self.num_layers * num_parts(self.num_patches(content), self.part_patches)
