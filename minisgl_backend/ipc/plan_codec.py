"""Encodes step plans and rank 0's decisions about them, for the ranks that execute them, too."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.step import StepDecisions, StepPlan


def pack_step(plan: StepPlan, decisions: StepDecisions) -> bytes:
    """The plan and the decisions as bytes."""
    return _ENCODER.encode((plan, decisions))


def unpack_step(data: bytes) -> tuple[StepPlan, StepDecisions]:
    """Decodes what `pack_step` encoded."""
    return _DECODER.decode(data)


def _from_array(array: npt.NDArray[Any]) -> tuple[str, bytes]:
    return array.dtype.str, array.tobytes()


def _to_array(_: type, packed: tuple[str, bytes]) -> npt.NDArray[Any]:
    return np.frombuffer(packed[1], dtype=packed[0])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_array)
_DECODER = msgspec.msgpack.Decoder(tuple[StepPlan, StepDecisions], dec_hook=_to_array)
