"""One adapter that becomes a part of its base: W + scale * B A, in float32, while a checkpoint is read. So weights are
quantized at load as they then are, steps cost what the base's do, and DoRA's magnitudes can be applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from minisgl_backend.adapters.tensors import AdapterTensors, Factors, module_names
from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.files import Readable
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.parts import PLAIN_DTYPES


class MergedCheckpoint:
    """A checkpoint whose tensors have an adapter in them."""

    def __init__(self, adapter: AdapterTensors, checkpoint: Readable, names: TensorNames, is_tied: bool) -> None:
        """is_tied: the output projection has the embedding's weight. Raises ConfigError for a module of which the
        checkpoint has no weight."""
        self._checkpoint, self._folder = checkpoint, adapter.source
        found = checkpoint.names()
        self._factors: dict[str, Factors] = {}
        for module, factors in adapter.by_module.items():
            if factors.of_embedding and is_tied:
                raise ConfigError(
                    f"{adapter.source}: {module} is also the output projection's weight, which the adapter leaves as "
                    "it is; allowed with tied embeddings: --adapters"
                )
            name = next((f"{one}.weight" for one in module_names(names, module) if f"{one}.weight" in found), None)
            if name is None:
                raise ConfigError(
                    f"{adapter.source}: the checkpoint has no {module}.weight that the adapter could be merged into; "
                    "allowed: modules whose weights it has in 16 or 32 bits"
                )
            self._factors[name] = factors
        self._bases = {
            f"{one}.weight": base for module, base in adapter.base.items() for one in module_names(names, module)
        }

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def path(self, name: str) -> Path:
        return self._checkpoint.path(name)

    def slices(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Any]]:
        wanted = set(names)
        if unread := sorted(self._factors.keys() - wanted):
            raise ConfigError(
                f"{self._folder}: {unread[0]} is not read of this checkpoint, so nothing is merged into it"
            )
        for name, source in self._checkpoint.slices(wanted, device):
            base = self._bases.get(name)
            if base is not None and not torch.equal(source[(slice(None), slice(None))].cpu(), base):
                raise ConfigError(
                    f"{self._folder}: {name} differs from this model's, as if tokens had been added or it had been "
                    "trained beside the adapter; allowed: the base's, or none (save_embedding_layers=False)"
                )
            factors = self._factors.get(name)
            yield name, source if factors is None else _Merged(source, factors, f"{self._folder}: {name}")


class _Merged:
    """A tensor of a file with an adapter in it, read as the file's is."""

    def __init__(self, source: Any, factors: Factors, where: str) -> None:
        self._source, self._factors, self._where = source, factors, where
        a, b = factors.a, factors.b
        shape, needed = tuple(source.get_shape()), (len(b), a.shape[1])
        if shape != (needed[::-1] if factors.of_embedding else needed):
            raise ConfigError(
                f"{where} has shape {shape}; the adapter's has {needed[0]} outputs and {needed[1]} inputs"
            )

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self._source.get_shape())

    def stored_rows(self, index: object) -> None:
        """None: it is not as it lies in the file."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = (*(index if isinstance(index, tuple) else (index,)), slice(None))[:2]
        weight = self._source[(rows, slice(None))]
        if weight.dtype not in PLAIN_DTYPES:
            number_format = str(weight.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{self._where} has the number format {number_format}; allowed for merging: 16 or 32 bits"
            )
        a, b, scale, magnitude, of_embedding = self._factors
        a, b = a.to(weight.device, torch.float32), b.to(weight.device, torch.float32)
        added = a.T[rows] @ b.T if of_embedding else b[rows] @ a
        merged = weight.float() + scale * added
        if magnitude is not None:
            lengths = torch.linalg.vector_norm(merged, dim=1)
            merged = merged * (magnitude.to(merged.device, torch.float32)[rows] / lengths)[:, None]
        return merged[:, columns]
