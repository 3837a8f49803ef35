"""Encodes what rank 0 tells other ranks: step plans with its decisions about them, and what to do with adapters."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.step import StepDecisions, StepPlan


class AdapterTask(msgspec.Struct, frozen=True):
    """A method of AdapterHost to call, between steps."""

    method: Literal["begin", "keep", "drop"]
    number: int
    folder: str = ""  # to begin with


def pack_step(plan: StepPlan, decisions: StepDecisions) -> bytes:
    """The plan and the decisions as bytes."""
    return _ENCODER.encode((plan, decisions))


def pack_task(task: AdapterTask) -> bytes:
    """The task as bytes."""
    return _ENCODER.encode(task)


def unpack(data: bytes) -> tuple[StepPlan, StepDecisions] | AdapterTask:
    """Decodes what `pack_step` or `pack_task` encoded."""
    return _DECODER.decode(data)


def _from_array(array: npt.NDArray[Any]) -> tuple[str, bytes]:
    return array.dtype.str, array.tobytes()


def _to_array(_: type, packed: tuple[str, bytes]) -> npt.NDArray[Any]:
    return np.frombuffer(packed[1], dtype=packed[0])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_array)
_DECODER = msgspec.msgpack.Decoder(tuple[StepPlan, StepDecisions] | AdapterTask, dec_hook=_to_array)
