"""GGUF's blocks in the layout of GPUs' kernels, in plain torch: the same numbers and scales, laid out anew at load.

A row is cut into blocks of 8 planes of 32 inputs, as 4-bit weights are (int4/reference.py), whose words they are.
Numbers of five, six and eight bits have eight: plus 128, they are words of their upper and of their lower nibbles.

Scales are in words [block, field, output]. Four fields: bfloat16 scales, those of two planes in a word. Eight: a word
of a plane has the scales of its first and of its last 16 inputs. FACTORED: each plane has a 6-bit scale and a 6-bit
minimum, a byte each, and a fifth word the block's two bfloat16 factors, that of the scales and the negative one of the
minima.
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
    size, eight, read = _TYPES[kind]
    numbers, fields = read(data.contiguous().unflatten(-1, (-1, size)))
    size_in = numbers.shape[-1]
    numbers = F.pad(numbers, (0, -size_in % BLOCK))
    low = pack(numbers & 15, PLANE) if eight else None
    return PackedBlocks(
        pack(numbers >> 4 if eight else numbers, PLANE), low, fields.permute(1, 2, 0).contiguous(), size_in
    )


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
    fields, minima = weight.fields.permute(2, 0, 1), None  # [outputs, blocks, fields]
    if weight.has_minima:
        halves = torch.stack([fields[..., :4], fields[..., :4] >> 16], -1).flatten(-2) & 0xFFFF  # of each plane
        scales = (halves & 255).float() * _bfloat16(fields[..., 4:])
        minima = (halves >> 8).float() * _bfloat16(fields[..., 4:] >> 16)
    else:
        scales = _bfloat16(torch.stack([fields, fields >> 16], -1).flatten(-2))
    numbers = numbers.unflatten(-1, (-1, padded // scales[0].numel())) * scales.flatten(1).unsqueeze(-1)
    if minima is not None:
        numbers = numbers + minima.flatten(1).unsqueeze(-1)
    return numbers.flatten(1)[:, : weight.size_in]


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """The lower half of int32 numbers as float32."""
    return (bits << 16).view(torch.float32)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Of bfloat16: int32, the lower half."""
    return numbers.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF


_Read = tuple[torch.Tensor, torch.Tensor]  # numbers, of 8 bits plus 128; fields [outputs, blocks, fields]


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block: uint8 [outputs, blocks, bytes] -> float32 [outputs, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _in_words(halves: torch.Tensor, fields: int = PLANES // 2) -> torch.Tensor:
    """Two halves in a word: int32 [outputs, halves] -> [outputs, blocks, fields]."""
    padded = F.pad(halves, (0, -halves.shape[-1] % (2 * fields))).unflatten(-1, (-1, fields, 2))
    return padded[..., 0] | padded[..., 1] << 16


def _scales(blocks: torch.Tensor) -> torch.Tensor:
    """Fields of blocks of 32 that begin with their scale."""
    return _in_words(_bits(_halves(blocks, 0)))


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """The lower ones of all bytes, then the upper ones."""
    return torch.cat([octets & 15, octets >> 4], -1)


def _q4_0(blocks: torch.Tensor) -> _Read:
    return _nibbles(blocks[..., 2:]).flatten(1), _scales(blocks)


def _q5_0(blocks: torch.Tensor) -> _Read:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., 2:6].unsqueeze(-1) >> places & 1).flatten(-2)
    return (_nibbles(blocks[..., 6:]) + 16 * fifth + 112).flatten(1), _scales(blocks)


def _q8_0(blocks: torch.Tensor) -> _Read:
    return (blocks[..., 2:] ^ 128).flatten(1), _scales(blocks)


def _factored(blocks: torch.Tensor) -> torch.Tensor:
    """Fields of blocks that begin with two factors, and six bits for each scale and minimum."""
    first, second, last = blocks[..., 4:8].int(), blocks[..., 8:12].int(), blocks[..., 12:16].int()
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], -1)
    factors = _bits(_halves(blocks, 0)) | _bits(-_halves(blocks, 2)) << 16
    return torch.cat([_in_words((scales | minima << 8).flatten(1)), factors.unsqueeze(-1)], -1)


def _q4_k(blocks: torch.Tensor) -> _Read:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1), _factored(blocks)


def _q5_k(blocks: torch.Tensor) -> _Read:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> places & 1).flatten(-2)
    numbers = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    return (numbers + 16 * fifth + 128).flatten(1), _factored(blocks)


def _q6_k(blocks: torch.Tensor) -> _Read:
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    upper = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3).flatten(-3)
    numbers = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208).unsqueeze(-1)
    return (numbers + 16 * upper + 96).flatten(1), _in_words(_bits(scales).flatten(1), PLANES)


# Bytes of a block, whether numbers have 8 bits here, and how they are read.
_TYPES: Mapping[str, tuple[int, bool, Callable[[torch.Tensor], _Read]]] = MappingProxyType(
    {
        "Q4_0": (18, False, _q4_0),
        "Q5_0": (22, True, _q5_0),
        "Q8_0": (34, True, _q8_0),
        "Q4_K": (144, False, _q4_k),
        "Q5_K": (176, True, _q5_k),
        "Q6_K": (210, True, _q6_k),
    }
)
# Types of GGUF that have this layout, and its memory over theirs.
PACKED: Mapping[str, float] = MappingProxyType(
    {"Q4_0": 1.0, "Q5_0": 34 / 22, "Q8_0": 1.0, "Q4_K": 148 / 144, "Q5_K": 276 / 176, "Q6_K": 288 / 210}
)
