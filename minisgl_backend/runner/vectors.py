"""The device's side of images: the encoder, the vectors that it has made, and what a pass is given of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from minisgl_backend.arrays import UInt8Array
from minisgl_backend.encoders.base import Encoder, State, TimedCall
from minisgl_backend.layers.model_input import GivenVectors, ModelInput, Rotation
from minisgl_backend.layers.rotary import RopeTable
from minisgl_backend.runner.graphs.image_inputs import ImageInputs
from minisgl_backend.runner.row_images import RowImages, StepImages
from minisgl_backend.step import EncodeSlice
from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)


class Vectors:
    """Of one rank; `step.vectors_key` are its keys. Slices and passes come in the order of the plans."""

    def __init__(
        self, encoder: Encoder, rows: RowImages, tables: Sequence[RopeTable], max_rows: int, tp: TensorParallel
    ) -> None:
        """tables: the model's."""
        self.rows = rows
        self._encoder, self._tables, self._tp = encoder, tuple(tables), tp
        self._parameter = next(encoder.parameters())
        device = self._parameter.device
        has_axes = any(table.axes is not None for table in self._tables)
        # Where the rotation has a decoding row's token: int32 [max_rows], added to the true position; None: there.
        self.shifts = torch.zeros(max_rows, dtype=torch.int32, device=device) if has_axes else None
        self._states: dict[bytes, tuple[State, int]] = {}  # with the units computed
        self._held: dict[bytes, torch.Tensor] = {}  # [num_vectors, width]

    @property
    def num_bytes(self) -> int:
        """Of what is held."""
        return sum(vectors.nbytes for vectors in self._held.values())

    @property
    def bidirectional(self) -> str:
        """In which of the decoder's layers an image's tokens see each other: as `EncoderConfig`."""
        return self._encoder.config.bidirectional

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._encoder.parameters())

    def timed_calls(self) -> Iterable[TimedCall]:
        """The encoder's, on a GPU."""
        return self._encoder.timed_calls() if self._parameter.is_cuda else ()

    def static_inputs(self, dtype: torch.dtype) -> ImageInputs:
        """For captured passes of the model, whose numbers have this dtype."""
        config = self._encoder.config
        angles = () if self.shifts is None else [table.cos_sin.shape[1] for table in self._tables]
        return ImageInputs(config.out_size, config.planes, angles, self._parameter.device, dtype)

    def admit(self, rows: torch.Tensor, shifts: torch.Tensor) -> None:
        """Rows that begin, and the shifts of their decoded tokens; int32 [num_admitted] each."""
        assert self.shifts is not None, "only rotations by axis have shifts"
        self.shifts[rows] = shifts

    def admit_plain(self, row: int) -> None:
        """A row without images begins."""
        if self.shifts is not None and self.rows.was_shifted(row):
            self.shifts[row] = 0

    def encode(self, images: StepImages) -> None:
        """Frees and encodes what a step says. What cannot be encoded becomes NaN, with which its requests fail."""
        for key in images.freed:
            self._states.pop(key, None)
            self._held.pop(key, None)
        self._encode_whole([one for one in images.encode if one.first == 0 and self.rows.ends(one)], images)
        for one in images.encode:
            self._run(one, images.pixels.get(one.key))

    def shown(
        self,
        tokens: ModelInput,
        images: StepImages,
        given_rows: torch.Tensor | None,
        rope_positions: torch.Tensor | None,
    ) -> ModelInput:
        """A pass with prompts: with vectors for `given_rows` and rotated by `rope_positions`, as of
        `RowImages.arrays`."""
        rotation, given = None, None
        if rope_positions is not None:
            rotation = Rotation(rope_positions)
            if rope_positions.dim() == 2:
                by_axis = rope_positions.long()
                places = torch.arange(by_axis.shape[1], device=by_axis.device, dtype=tokens.positions.dtype)
                rotation = Rotation(places, tuple(table.of_step(by_axis) for table in self._tables))
        if given_rows is not None:
            parts = [self._held[one.key][one.first : one.last] for one in images.gathered]
            vectors, *planes = torch.cat(parts).split(self._encoder.config.out_size, dim=1)
            behind = zip(self._encoder.config.planes, planes, strict=True)
            given = GivenVectors(given_rows.long(), vectors, tuple(behind))
        return tokens._replace(rotation=rotation, given=given)

    def _encode_whole(self, slices: Sequence[EncodeSlice], images: StepImages) -> None:
        """What is encoded from its beginning to its end by this rank, in one call: small images leave most of a GPU
        idle one by one. What fails is tried again alone, in the way of slices."""
        own = {one.key: one for one in slices if one.rank == self._tp.rank and one.key not in self._held}
        if not own:
            return
        try:
            pixels = [(self._uploaded(images.pixels[key]), one.content.grid) for key, one in own.items()]
            self._held |= zip(own, self._encoder.encode_all(pixels), strict=True)
        except Exception:
            log.exception("%d images cannot be encoded together", len(own))

    def _run(self, one: EncodeSlice, pixels: UInt8Array | None) -> None:
        is_last = self.rows.ends(one)
        if one.rank == self._tp.rank and one.key not in self._held:
            self._try(one, lambda: self._slice(one, pixels, is_last))
        if not is_last:
            return
        shape = (one.content.num_vectors, self._encoder.config.width)
        vectors = self._held.get(one.key)
        if one.rank != self._tp.rank:
            vectors = self._parameter.new_empty(shape)
        elif vectors is None or vectors.shape != shape:
            if vectors is not None:
                log.error("an image became %d vectors where its prompt has %d", len(vectors), one.content.num_vectors)
            vectors = self._parameter.new_full(shape, torch.nan)
        self._held[one.key] = self._tp.broadcast(vectors.contiguous(), one.rank)
        self._states.pop(one.key, None)

    def _slice(self, one: EncodeSlice, pixels: UInt8Array | None, is_last: bool) -> None:
        if one.first == 0:
            assert pixels is not None, "an image that begins has its pixels"
            self._states[one.key] = self._encoder.begin(self._uploaded(pixels), one.content.grid), 0
        state, done = self._states[one.key]
        if done < one.last:  # else an earlier attempt at the step has computed it
            self._encoder.run(state, done, one.last)
            self._states[one.key] = state, one.last
        if is_last:
            self._held[one.key] = self._encoder.finish(state)

    def _uploaded(self, pixels: UInt8Array) -> torch.Tensor:
        """From shared memory, which may be read only, by one copy to where the device reads it."""
        device = self._parameter.device
        host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        host.numpy()[:] = pixels
        return host.to(device, non_blocking=True)

    def _try(self, one: EncodeSlice, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            log.exception("an image of shape %s cannot be encoded", one.content.shape)
            self._states.pop(one.key, None)
