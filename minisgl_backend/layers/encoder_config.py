"""The encoder of a model's images as data: families write it, `encoders.build` makes modules of it. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Of pixels of 0 to 1: (pixel - mean) / std, by channel."""

    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ABC):
    """Sizes that scheduler and runner ask for, of any encoder. Subclasses have those that its module needs."""

    module: ClassVar[str]  # MODULE:CLASS of the `encoders.base.Encoder` that runs it
    part_patches: ClassVar[int] = 0  # a layer of a larger image is computed in parts of so many patches; 0: it is not

    out_size: int  # of a vector: the decoder's hidden size
    hidden_size: int
    num_layers: int  # that slices can be cut between
    patch_size: int  # pixels
    merge: int = 1  # a vector stands for so many patches by as many
    planes: tuple[int, ...] = ()  # decoder layers behind which a further vector of each token is added
    # In which of the decoder's layers an image's tokens see each other: none, those with a window, or all.
    bidirectional: Literal["none", "windows", "all"] = "none"
    window: int | None = None  # patches along a side of the windows that attention stays in; None: the whole image
    full_layers: tuple[int, ...] = ()  # see the whole image even so
    plane_layers: tuple[int, ...] = ()  # whose outputs become the planes
    normalisation: Normalisation = Normalisation()

    @property
    def width(self) -> int:
        """Numbers of a token: its vector, then those of the planes."""
        return self.out_size * (1 + len(self.planes))

    def state_size(self, item_bytes: int) -> int:
        """Bytes of a patch between two slices, of numbers of so many bytes."""
        planes = len(self.planes) * self.out_size // self.merge**2
        return (self.hidden_size + planes) * item_bytes

    def longest_call(self, shape: tuple[int, int, int, int]) -> int:
        """Operations of an image of this shape that no slice cuts: of a part of a layer."""
        tiles, height, width, _ = shape
        in_tile = height * width // self.patch_size**2
        per_patch, per_pair = self.operations()
        patches = tiles * in_tile
        return min(patches, self.part_patches or patches) * (per_patch + in_tile * per_pair)

    def begin_operations(self) -> int:
        """For a patch, before the first layer."""
        return 0

    def plane_operations(self) -> int:
        """For a patch, where it becomes a part of a vector, or of a plane's."""
        return 0

    def whole_operations(self, patches: int) -> int:
        """Of all layers, for an image of one tile with so many patches."""
        per_patch, per_pair = self.operations()
        full = self.num_layers if self.window is None else len(self.full_layers)
        seen = full * patches + (self.num_layers - full) * min(patches, (self.window or 0) ** 2)
        return patches * (self.num_layers * per_patch + seen * per_pair)

    @abstractmethod
    def operations(self) -> tuple[int, int]:
        """Multiplications and additions of one layer: for a patch, and for a pair of patches of which one attends to
        the other."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(EncoderConfig):
    """A vision transformer (Dosovitskiy et al., 2021), before what turns its patches into vectors."""

    # 0.7 ms on an H100, in attention to 47,000: with 16 heads tiles of 128 queries are one for each multiprocessor.
    part_patches: ClassVar[int] = 1024

    intermediate_size: int
    num_heads: int
    activation: str  # of its MLPs; in transformers' words
    gated: bool = False  # MLPs have a gate
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    bias: bool = True  # of all linear layers of its blocks
    patch_bias: bool = True
    rope_theta: float | None = None  # of a rotation by row and column; None: none
    rope_split: Literal["alike", "in turns"] = "alike"  # rows and columns have the same frequencies, or every other one
    num_positions: int = 0  # of a square table of learned positions, 0: none

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def timed_shapes(self) -> list[tuple[int, int, int, int]]:
        """Of images that are timed at start, of so many parts that attention takes most of a call."""
        blocks, side = 32 // self.merge, self.merge * self.patch_size  # pixels of a block that a vector stands for
        columns = [count * self.part_patches // 32 // self.merge for count in (16, 32)]
        return [(1, blocks * side, count * side, 3) for count in columns]

    def begin_operations(self) -> int:
        """Its embedding, and the first layer's queries, keys and values."""
        return 2 * self.hidden_size * (3 * self.patch_size**2 + 3 * self.hidden_size)

    def plane_operations(self) -> int:
        """About: blocks of patches through an MLP of their size."""
        joined = self.hidden_size * self.merge**2
        return 2 * self.hidden_size * (joined + self.out_size)

    def state_size(self, item_bytes: int) -> int:
        angles = 0 if self.rope_theta is None else 4 * self.head_dim
        # Queries, keys and values of a layer, and of the next one.
        return super().state_size(item_bytes) + angles + 2 * 3 * self.hidden_size * item_bytes

    def operations(self) -> tuple[int, int]:
        mlp = (3 if self.gated else 2) * self.intermediate_size
        return 2 * self.hidden_size * (4 * self.hidden_size + mlp), 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(TransformerConfig):
    """Of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: blocks of `merge` by `merge` patches become a vector by an MLP."""

    module: ClassVar[str] = "minisgl_backend.encoders.qwen_vl:QwenVision"

    generation: Literal["2", "2.5", "3"]  # of the names in checkpoints


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(TransformerConfig):
    """SigLIP (Zhai et al., 2023), whose patches are averaged, normed and projected: of Gemma 3."""

    module: ClassVar[str] = "minisgl_backend.encoders.siglip:PooledSiglip"

    image_size: int  # pixels along a side

    def timed_shapes(self) -> list[tuple[int, int, int, int]]:
        """Tiles have one size."""
        tiles = 8 * self.part_patches // (self.image_size // self.patch_size) ** 2
        return [(max(tiles, 1), self.image_size, self.image_size, 3)]


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(TransformerConfig):
    """Pixtral, whose patches are normed, merged and projected: of Mistral 3."""

    module: ClassVar[str] = "minisgl_backend.encoders.pixtral:Pixtral"

    projector_eps: float
    projector_bias: bool
    projector_activation: str


@dataclass(frozen=True, kw_only=True)
class TowerConfig(EncoderConfig):
    """A tower as transformers builds it, which computes tiles whole: `num_layers` are equal shares of an image's tiles,
    1 where an image is one tile."""

    module: ClassVar[str] = "minisgl_backend.encoders.transformers_tower:TransformersTower"

    values: Mapping[str, Any]  # config.json
    depth: int  # layers
    tiles: int = 4  # that a GPU computes at once
    intermediate_size: int
    scale: float = 1.0  # of its vectors, where a decoder multiplies these as it does embeddings

    def longest_call(self, shape: tuple[int, int, int, int]) -> int:
        """Or of the tiles that are computed at once."""
        share, tile = super().longest_call(shape), super().longest_call((1, *shape[1:]))
        return max(share, min(shape[0], self.tiles) * tile * self.num_layers)

    def state_size(self, item_bytes: int) -> int:
        """Pixels, and what has become of those that were computed."""
        return 3 * self.patch_size**2 + self.out_size * item_bytes

    def operations(self) -> tuple[int, int]:
        layer = 2 * self.hidden_size * (4 * self.hidden_size + 3 * self.intermediate_size)
        return layer * self.depth // self.num_layers, 4 * self.hidden_size * self.depth // self.num_layers
