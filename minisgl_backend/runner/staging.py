"""The one upload of a step: many small int32 arrays in one pinned buffer, one copy, and views of it on the device."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kernels.upload import to_device

ORDINARY_EXTRA = 1 << 20  # int32 words after the decode part; a step that needs more gets its own buffer

# Every array is aligned to 16 bytes. Triton recompiles a kernel for each combination of unaligned pointers, which would
# stall running streams.
ALIGNMENT = 4  # int32 words


class Staged(msgspec.Struct, frozen=True):
    """A filled host buffer, not yet uploaded."""

    buffer: int  # index of the host buffer
    used: int  # words of it
    extra: Int32Array | None  # the arrays, where they did not fit
    layout: dict[str, tuple[int, tuple[int, ...]]]  # offset in words, and shape, of each array after the decode part


class _HostBuffers:
    """Two pinned buffers, used alternately and each guarded by an event, and one on the device. One is enough there:
    uploads and the kernels that read them are on one stream."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._tensors = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._arrays: list[Int32Array] = [tensor.numpy() for tensor in self._tensors]
        self._uploaded = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self.next = 0
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)

    def take(self) -> int:
        """The number of the next buffer, which is another one then."""
        taken, self.next = self.next, 1 - self.next
        return taken

    def array(self, buffer: int) -> Int32Array:
        """To be filled, after its last upload has ended."""
        if self._uploaded:
            self._uploaded[buffer].synchronize()
        return self._arrays[buffer]

    def upload(self, buffer: int, words: int) -> None:
        """Starts the copy of its first words."""
        self.on_device[:words].copy_(self._tensors[buffer][:words], non_blocking=True)
        if self._uploaded:
            self._uploaded[buffer].record()


class Staging:
    """Of the arrays of steps."""

    rows: torch.Tensor  # int32 [max_rows], device, fixed address: the decode rows
    lengths: torch.Tensor  # int32 [max_rows], device, fixed address: the decode lengths

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._lengths_at, self._extra_at = aligned(max_rows), 2 * aligned(max_rows)
        self._device = device
        size = self._extra_at + ORDINARY_EXTRA
        self._buffers = _HostBuffers(size, device)
        on_device = self._buffers.on_device
        self._extra = on_device[self._extra_at :]
        self.rows = on_device[:max_rows]
        self.lengths = on_device[self._lengths_at : self._lengths_at + max_rows]

    def fill(self, rows: Int32Array, lengths: Int32Array, arrays: dict[str, Int32Array]) -> Staged:
        """Copies the decode part and the named arrays into the next host buffer, after its last upload has ended."""
        index = self._buffers.take()
        host = self._buffers.array(index)
        host[: len(rows)] = rows
        host[self._lengths_at : self._lengths_at + len(lengths)] = lengths
        layout, total = {}, 0
        for name, array in arrays.items():
            layout[name] = (total, array.shape)
            total += aligned(array.size)
        fits = total <= ORDINARY_EXTRA
        target = host[self._extra_at :] if fits else np.empty(total, dtype=np.int32)
        for (offset, _), array in zip(layout.values(), arrays.values(), strict=True):
            target[offset : offset + array.size] = array.reshape(-1)
        return Staged(index, self._extra_at + total if fits else self._extra_at, None if fits else target, layout)

    def upload(self, staged: Staged) -> dict[str, torch.Tensor]:
        """`send`, then `arrays`."""
        self.send(staged)
        return self.arrays(staged)

    def send(self, staged: Staged) -> None:
        """Starts the copy, except of arrays that did not fit."""
        self._buffers.upload(staged.buffer, staged.used)

    def first(self, words: int) -> torch.Tensor:
        """The first array of a step on the device, if it has `words` words and fits: a fixed address."""
        return self._extra[:words]

    def arrays(self, staged: Staged) -> dict[str, torch.Tensor]:
        """The arrays as int32 device tensors, valid until the next upload."""
        source = self._extra if staged.extra is None else to_device(staged.extra, self._device)
        return {
            name: source[offset : offset + math.prod(shape)].view(shape)
            for name, (offset, shape) in staged.layout.items()
        }


def aligned(words: int) -> int:
    """`words` rounded up to the alignment."""
    return -(-words // ALIGNMENT) * ALIGNMENT


class MaskStaging:
    """Uploads of grammar masks: two alternating pinned host buffers, and one device buffer at a fixed address.

    Separate from the step's upload, since masks are known later: they are computed during the forward pass.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self.num_words = max_rows, -(-vocab_size // 32)
        self._first = aligned(max_rows)  # offset of the bitmask in words; before it, each row's index into it
        size = self._first + max_rows * self.num_words
        self._buffers = _HostBuffers(size, device)
        self._on_device = self._buffers.on_device
        self._on_device[:max_rows] = -1
        self._masks_some = False

    def bitmask_rows(self, count: int) -> Int32Array:
        """Buffer for `count` bitmask rows, [count, num_words], which the next `upload` need not copy."""
        host = self._buffers.array(self._buffers.next)
        return host[self._first : self._first + count * self.num_words].reshape(count, self.num_words)

    def upload(self, n: int, indices: Int32Array, bits: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks `bits` [k, ceil(vocab_size / 32)] for the rows `indices` [k] of a step that samples n rows.

        Returns, on the device and valid until the next upload: for each of the n rows its row of `bits` or -1, int32
        [n]; and the bits.
        """
        index = self._buffers.take()
        host = self._buffers.array(index)
        host[:n] = -1
        host[indices] = np.arange(len(indices), dtype=np.int32)
        used = self._first + bits.size
        target = host[self._first : used]
        if bits.ctypes.data != target.ctypes.data:
            target[:] = bits.reshape(-1)
        self._buffers.upload(index, used)
        self._masks_some = True
        return self._on_device[:n], self._on_device[self._first : used].view(bits.shape)

    def clear(self) -> None:
        """In stream order, makes `fixed` mask no row."""
        if self._masks_some:
            self._on_device[: self._max_rows].fill_(-1)
            self._masks_some = False

    def fixed(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that `upload` returns for n rows, with the bitmask at full size: for captured graphs."""
        return self._on_device[:n], self._on_device[self._first :].view(self._max_rows, self.num_words)
