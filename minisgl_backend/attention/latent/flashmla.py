"""The `flashmla` backend: DeepSeek's FlashMLA for decode over latents on Hopper, pages of 64 tokens.

From sgl-kernel, or from the package flash_mla. Its kernel distributes the tiles of all sequences over the
multiprocessors by a plan that another kernel makes from the lengths, once per step. Prefill uses this project's
kernels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, LayerGroup
from minisgl_backend.attention.batch_tables import BatchTables
from minisgl_backend.attention.latent.triton_attn import TritonPrefillBackend
from minisgl_backend.attention.layer import AttentionLayer

_MODULES = ("sgl_kernel.flash_mla", "flash_mla")  # both have the authors' two functions


def answers() -> bool:
    """Returns true; otherwise raises ImportError saying what each of the packages lacks."""
    _kernels()
    return True


def _kernels() -> Any:
    """The module that has get_mla_metadata and flash_mla_with_kvcache."""
    failures = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
            if getattr(module, "_flashmla_import_error", None) is not None:
                raise module._flashmla_import_error
        except Exception as error:  # compiled packages fail in many ways
            failures.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if hasattr(module, "flash_mla_with_kvcache") and hasattr(module, "get_mla_metadata"):
            return module
        failures.append(f"{name}: has no flash_mla_with_kvcache")
    raise ImportError("; ".join(failures))


@dataclass(frozen=True)
class _Plan:
    kv_lens: torch.Tensor  # int32 [batch]
    page_table: torch.Tensor  # int32 [batch, pages]
    tiles: torch.Tensor  # the kernel's schedule: which tiles each multiprocessor has
    num_splits: torch.Tensor  # int32 [batch + 1]


class FlashMLABackend(TritonPrefillBackend):
    supports_graphs, joins_queries = True, True

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        module = _kernels()
        self._kernel, self._metadata = module.flash_mla_with_kvcache, module.get_mla_metadata
        self._tables = BatchTables(spec)
        self._captured: dict[int, _Plan] = {}

    def plan_decode(self, inputs: DecodeInputs) -> _Plan:
        tiles, num_splits = self._metadata(inputs.kv_lens, self.group.num_q_heads, 1)
        return _Plan(inputs.kv_lens, self._tables.gather(inputs), tiles, num_splits)

    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: _Plan) -> torch.Tensor:
        attended, _ = self._kernel(
            q.unsqueeze(1),
            layer.kv.k.transpose(1, 2),  # tokens before the head
            plan.page_table,
            plan.kv_lens,
            self.heads.rank,
            plan.tiles,
            plan.num_splits,
            layer.scale,
            True,
        )
        squeezed: torch.Tensor = attended.squeeze(1)
        return squeezed

    def allocate_graph(self, max_batch_size: int) -> None:
        self._tables.allocate(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        tiles, num_splits = self._metadata(inputs.kv_lens, self.group.num_q_heads, 1)
        plan = _Plan(inputs.kv_lens, self._tables.gather_static(inputs), tiles, num_splits)
        return self._captured.setdefault(inputs.batch_size, plan)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        plan = self._captured[inputs.batch_size]
        self._tables.gather_static(inputs)
        tiles, num_splits = self._metadata(inputs.kv_lens, self.group.num_q_heads, 1)
        plan.tiles.copy_(tiles)
        plan.num_splits.copy_(num_splits)
