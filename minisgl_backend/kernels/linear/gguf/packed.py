"""GGUF's blocks in the layout of GPUs' kernels, in plain torch: the same numbers and scales, laid out anew at load.

A row is cut into blocks of 8 planes of 32 inputs, as 4-bit weights are (int4/reference.py), whose words they are;
Q8_0's numbers, plus 128, are words of their upper and of their lower nibbles. A plane has one scale. Those of two
planes share a word [block, field, output]: two bfloat16 numbers; or, of Q4_K, for each plane its 6-bit scale and
minimum, a byte each, and in a fifth word the block's two bfloat16 factors, that of the scales and the negative one of
the minima.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import WeightKind
from minisgl_backend.kernels.linear.int4.reference import PLANES, pack, rows_at_once, unpack

PLANE = 32
BLOCK = PLANES * PLANE
FACTORED = 5  # fields of a block with minima


@dataclass(frozen=True)
class PackedBlocks:
    """Outputs in one type."""

    words: torch.Tensor  # int32 [outputs, padded inputs / 8]; of 8-bit numbers their upper halves
    low: torch.Tensor | None  # likewise their lower halves
    fields: torch.Tensor  # int32 [blocks, 4 or FACTORED, outputs]; outputs may be apart
    size_in: int
    kind: WeightKind = field(init=False)

    def __post_init__(self) -> None:
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        object.__setattr__(self, "kind", WeightKind(len(self.words), self.size_in, nbytes))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.words, self.fields) if self.low is None else (self.words, self.fields, self.low)

    @property
    def has_minima(self) -> bool:
        return self.fields.shape[1] == FACTORED

    def rows(self, at: slice) -> PackedBlocks:
        low = None if self.low is None else self.low[at]
        return replace(self, words=self.words[at], low=low, fields=self.fields[..., at])


@dataclass
class PackedWeight:
    """Outputs below one another, of which each tensor may have its type, or be plain: [outputs, inputs]."""

    shape: tuple[int, int]
    pieces: tuple[PackedBlocks | torch.Tensor, ...] = ()

    def fill(self, pieces: Sequence[PackedBlocks | torch.Tensor]) -> None:
        """Once they are loaded."""
        self.pieces = tuple(pieces)

    @property
    def kind(self) -> WeightKind:
        sizes = (one.nbytes if isinstance(one, torch.Tensor) else one.kind.nbytes for one in self.pieces)
        return WeightKind(*self.shape, sum(sizes))


def merged(pieces: Sequence[PackedBlocks | torch.Tensor]) -> tuple[PackedBlocks | torch.Tensor, ...]:
    """One, where all have one layout."""
    _, *others = pieces
    if others and all(isinstance(one, torch.Tensor) for one in pieces):
        return (torch.cat(list(pieces)),)  # type: ignore[arg-type]
    blocks = [one for one in pieces if isinstance(one, PackedBlocks)]
    alike = len({(one.low is None, one.has_minima) for one in blocks}) == 1
    if not others or not alike or len(blocks) < len(pieces):
        return tuple(pieces)
    low = [one.low for one in blocks if one.low is not None]
    return (
        PackedBlocks(
            torch.cat([one.words for one in blocks]),
            torch.cat(low) if low else None,
            torch.cat([one.fields for one in blocks], -1),
            blocks[0].size_in,
        ),
    )


def packed(kind: str, data: torch.Tensor) -> PackedBlocks:
    """kind: of PACKED. data: uint8 [outputs, bytes], as they lie in a file."""
    size, read = _TYPES[kind]
    numbers, scales, factors = read(data.contiguous().unflatten(-1, (-1, size)))
    size_in = numbers.shape[-1]
    missing = -scales.shape[-1] % PLANES  # planes of the last block
    pairs = F.pad(scales, (0, missing)).unflatten(-1, (-1, PLANES // 2, 2)).int() & 0xFFFF  # [outputs, blocks, 4, 2]
    fields = pairs[..., 0] | pairs[..., 1] << 16
    if factors is not None:
        fields = torch.cat([fields, factors.unsqueeze(-1)], -1)
    numbers = F.pad(numbers, (0, missing * PLANE))
    low = pack(numbers & 15, PLANE) if size == _BYTES_Q8 else None
    words = pack(numbers if low is None else numbers >> 4, PLANE)
    return PackedBlocks(words, low, fields.permute(1, 2, 0).contiguous(), size_in)


def dequantized(weight: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs], computed in float32 and rounded once."""
    out = torch.empty((len(weight.words), weight.size_in), dtype=dtype, device=weight.words.device)
    for part in rows_at_once(out):
        out[part] = _numbers(weight.rows(part)).to(dtype)
    return out


def _numbers(weight: PackedBlocks) -> torch.Tensor:
    padded = PLANES * weight.words.shape[-1]
    numbers = unpack(weight.words, padded, PLANE).float()
    if weight.low is not None:
        numbers = 16 * (numbers - 8) + unpack(weight.low, padded, PLANE).float()
    elif not weight.has_minima:
        numbers = numbers - 8
    fields = weight.fields.permute(2, 0, 1)  # [outputs, blocks, fields]
    halves = torch.stack([fields[..., :4], fields[..., :4] >> 16], -1).flatten(-2) & 0xFFFF  # of each plane
    minima = None
    if weight.has_minima:
        scales = (halves & 255).float() * _bfloat16(fields[..., 4:])
        minima = (halves >> 8).float() * _bfloat16(fields[..., 4:] >> 16)
    else:
        scales = _bfloat16(halves)
    numbers = numbers.unflatten(-1, (-1, PLANE)) * scales.flatten(1).unsqueeze(-1)
    if minima is not None:
        numbers = numbers + minima.flatten(1).unsqueeze(-1)
    return numbers.flatten(1)[:, : weight.size_in]


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """The lower half of int32 numbers as float32."""
    return (bits << 16).view(torch.float32)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Of bfloat16: int32, the lower half."""
    return numbers.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF


_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # numbers, 16 bits for each plane, factors of each block


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block: uint8 [outputs, blocks, bytes] -> float32 [outputs, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _q4_0(blocks: torch.Tensor) -> _Read:
    quants = blocks[..., 2:]
    return torch.cat([quants & 15, quants >> 4], -1).flatten(1), _bits(_halves(blocks, 0)), None


def _q8_0(blocks: torch.Tensor) -> _Read:
    return (blocks[..., 2:] ^ 128).flatten(1), _bits(_halves(blocks, 0)), None


def _q4_k(blocks: torch.Tensor) -> _Read:
    quants = blocks[..., 16:].unflatten(-1, (4, 32))
    numbers = torch.stack([quants & 15, quants >> 4], -2).flatten(1)
    first, second, last = blocks[..., 4:8].int(), blocks[..., 8:12].int(), blocks[..., 12:16].int()
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], -1)
    factors = _bits(_halves(blocks, 0)) | _bits(-_halves(blocks, 2)) << 16
    return numbers, (scales | minima << 8).flatten(1), factors


_BYTES_Q8 = 34
_TYPES: Mapping[str, tuple[int, Callable[[torch.Tensor], _Read]]] = MappingProxyType(
    {"Q4_0": (18, _q4_0), "Q8_0": (_BYTES_Q8, _q8_0), "Q4_K": (144, _q4_k)}
)
PACKED = tuple(_TYPES)  # types of GGUF that have this layout
