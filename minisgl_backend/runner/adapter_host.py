"""The adapters that one rank reads while it serves, on a thread of its own."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from minisgl_backend.adapters.roots import TASK_FILE, check_sizes
from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.adapters.task import read_task
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.errors import ConfigError
from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

_READING, _FAILED = -2, -1  # in place of a digest, when ranks compare theirs
_DIFFERS = (
    "another rank could not read it, or read another adapter: its log says why; allowed: the same on each machine"
)


class AdapterHost:
    """Used by one thread. An adapter is read with `begin`, which returns at once, and there once `keep` has returned:
    its number may then be planned."""

    def __init__(self, slots: AdapterSlots, tp: TensorParallel) -> None:
        self._slots, self._tp = slots, tp
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=self._open_device)
        self._reading: dict[int, Future[tuple[bytes, torch.Tensor]]] = {}

    def begin(self, number: int, folder: str) -> None:
        """Reads an adapter."""
        self._reading[number] = self._reader.submit(self._read, Path(folder))

    def is_read(self, number: int) -> bool:
        """Whether this rank has read it."""
        return self._reading[number].done()

    def keep(self, number: int) -> bytes | None:
        """All ranks have it, or none, and agree about its digest, which is returned; None: some still read, and it is
        to be called again. Each rank calls it, between the same steps. Raises ConfigError that says what is wrong."""
        error, digest, short = None, b"", _READING
        if self._reading[number].done():
            try:
                digest, ready = self._reading[number].result()
                short = int.from_bytes(digest[:7], "big")
            except ConfigError as wrong:
                error, short = wrong, _FAILED
            except Exception as failure:  # no memory, above all
                log.exception("an adapter cannot be read")
                why = f"the adapter cannot be read ({type(failure).__name__}: {str(failure)[:200]})"
                error, short = ConfigError(why), _FAILED
        smallest, largest = self._tp.minimum(short), -self._tp.minimum(-short)
        if smallest == _READING:
            return None
        del self._reading[number]
        if error is not None:
            raise error
        if smallest != largest:
            raise ConfigError(_DIFFERS)
        self._slots.keep(number, ready)
        return digest

    def drop(self, number: int) -> None:
        """The host needs it no more; also one that is being read."""
        if (reading := self._reading.pop(number, None)) is not None:
            reading.cancel()  # it may not have begun
        self._slots.drop(number)

    def _open_device(self) -> None:
        if self._slots.device.type == "cuda":
            torch.cuda.set_device(self._slots.device)

    def _read(self, folder: Path) -> tuple[bytes, torch.Tensor]:
        with torch.inference_mode():
            check_sizes(folder, self._slots.most_file_bytes)
            as_tensors = (folder / TASK_FILE).is_file()
            adapter = read_task(folder, self._slots.size_of) if as_tensors else AdapterTensors.read(folder)
            return adapter.digest, self._slots.ready(adapter)
