"""The one upload of a step: many small int32 arrays in one pinned buffer, one copy, and views of it on the device."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from minisgl_backend.arrays import Int32Array

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


class _HostBuffer:
    def __init__(self, size: int, pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.array: Int32Array = self.tensor.numpy()
        self.uploaded: torch.cuda.Event | None = torch.cuda.Event() if pinned else None


class Staging:
    """Two pinned host buffers, used alternately and each guarded by an event, and one device buffer.

    One device buffer is enough: uploads and the kernels that read them are on one stream.
    """

    rows: torch.Tensor  # int32 [max_rows], device, fixed address: the decode rows
    lengths: torch.Tensor  # int32 [max_rows], device, fixed address: the decode lengths

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._lengths_at, self._extra_at = aligned(max_rows), 2 * aligned(max_rows)
        self._device = device
        size = self._extra_at + ORDINARY_EXTRA
        self._hosts = [_HostBuffer(size, pinned=device.type == "cuda") for _ in range(2)]
        self._next = 0
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._extra = self._on_device[self._extra_at :]
        self.rows = self._on_device[:max_rows]
        self.lengths = self._on_device[self._lengths_at : self._lengths_at + max_rows]

    def fill(self, rows: Int32Array, lengths: Int32Array, arrays: dict[str, Int32Array]) -> Staged:
        """Copies the decode part and the named arrays into the next host buffer, after its last upload has ended."""
        index, self._next = self._next, 1 - self._next
        host = self._hosts[index]
        if host.uploaded is not None:
            host.uploaded.synchronize()
        host.array[: len(rows)] = rows
        host.array[self._lengths_at : self._lengths_at + len(lengths)] = lengths
        layout, total = {}, 0
        for name, array in arrays.items():
            layout[name] = (total, array.shape)
            total += aligned(array.size)
        fits = total <= ORDINARY_EXTRA
        target = host.array[self._extra_at :] if fits else np.empty(total, dtype=np.int32)
        for (offset, _), array in zip(layout.values(), arrays.values(), strict=True):
            target[offset : offset + array.size] = array.reshape(-1)
        return Staged(index, self._extra_at + total if fits else self._extra_at, None if fits else target, layout)

    def upload(self, staged: Staged) -> dict[str, torch.Tensor]:
        """`send`, then `arrays`."""
        self.send(staged)
        return self.arrays(staged)

    def send(self, staged: Staged) -> None:
        """Starts the copy, except of arrays that did not fit."""
        host = self._hosts[staged.buffer]
        self._on_device[: staged.used].copy_(host.tensor[: staged.used], non_blocking=True)
        if host.uploaded is not None:
            host.uploaded.record()

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


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device, in stream order, by pinned memory: a copy from pageable memory would wait for the step."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


class MaskStaging:
    """Uploads of grammar masks: two alternating pinned host buffers, and one device buffer at a fixed address.

    Separate from the step's upload, since masks are known later: they are computed during the forward pass.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows, self.num_words = max_rows, -(-vocab_size // 32)
        self._first = aligned(max_rows)  # offset of the bitmask in words; before it, each row's index into it
        size = self._first + max_rows * self.num_words
        self._hosts = [_HostBuffer(size, pinned=device.type == "cuda") for _ in range(2)]
        self._next = 0
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_device[:max_rows] = -1
        self._masks_some = False

    def bitmask_rows(self, count: int) -> Int32Array:
        """Buffer for `count` bitmask rows, [count, num_words], which the next `upload` need not copy."""
        host = self._next_host()
        return host.array[self._first : self._first + count * self.num_words].reshape(count, self.num_words)

    def upload(self, n: int, indices: Int32Array, bits: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks `bits` [k, ceil(vocab_size / 32)] for the rows `indices` [k] of a step that samples n rows.

        Returns, on the device and valid until the next upload: for each of the n rows its row of `bits` or -1, int32
        [n]; and the bits.
        """
        host = self._next_host()
        self._next = 1 - self._next
        host.array[:n] = -1
        host.array[indices] = np.arange(len(indices), dtype=np.int32)
        used = self._first + bits.size
        target = host.array[self._first : used]
        if bits.ctypes.data != target.ctypes.data:
            target[:] = bits.reshape(-1)
        self._on_device[:used].copy_(host.tensor[:used], non_blocking=True)
        if host.uploaded is not None:
            host.uploaded.record()
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

    def _next_host(self) -> _HostBuffer:
        """The next host buffer, after its last upload has ended."""
        host = self._hosts[self._next]
        if host.uploaded is not None:
            host.uploaded.synchronize()
        return host
