"""The `fi` backend: FlashInfer's paged prefill and decode (Ye et al., 2025), any power-of-two page size.

FlashInfer plans on the host: lengths come from the host arrays of the inputs, page ids are gathered on the device, and
nothing waits for the device. Plans depend on lengths, not on page ids, so layers that only differ in their cache group
(page table) share a plan.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, DecodeInputs, LayerGroup, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.upload import to_device

_WORKSPACE_BYTES = 256 << 20
_PREBUILT = "flashinfer_jit_cache"  # a package with its compiled kernels


def prepare_kernels() -> bool:
    """Checks that FlashInfer's kernels, which it compiles at their first use (in the first step), are available.

    Returns true if they are installed, cached or can be compiled. Else raises FileNotFoundError naming what is missing,
    by the rules of FlashInfer's jit/cpp_ext.py.
    """
    if importlib.util.find_spec(_PREBUILT) is not None:
        return True
    _let_ninja_be_found()
    if any(_cache().rglob("*.so")):
        return True
    for program in (_nvcc(), os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(shlex.split(program)[0]) is None:
            raise FileNotFoundError(f"they are compiled at first use, and there is no {program}")
    return True


def _cache() -> Path:
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc")
        home = str(Path(found).parent.parent) if found is not None else "/usr/local/cuda"
    return os.environ.get("FLASHINFER_NVCC", f"{home}/bin/nvcc")


def _let_ninja_be_found() -> None:
    """Adds the folder of this Python to PATH: FlashInfer installs ninja there, and the environment may be inactive."""
    bin_folder = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=bin_folder) is not None:
        os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), bin_folder])


class Pages:
    """The flattened pages of a batch, built without waiting for the device."""

    def __init__(
        self, kv_lens: np.ndarray[Any, np.dtype[np.int32]], rows: torch.Tensor, page_size: int, device: torch.device
    ) -> None:
        """kv_lens: of the sequences; rows: their rows of each page table, int32 on the device."""
        counts = (kv_lens + page_size - 1) // page_size
        indptr = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        # One upload for both; with `output_size`, repeat_interleave does not synchronise.
        counts_device, starts = to_device(np.concatenate([counts, indptr[:-1]]).astype(np.int32), device).chunk(2)
        total = int(indptr[-1])
        sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), counts_device, output_size=total)
        self._columns = torch.arange(total, device=device, dtype=torch.int32) - starts[sequence]
        self._rows = rows[sequence]
        self.indptr = torch.from_numpy(indptr)  # int32 [num_seqs + 1], host
        last = kv_lens - (counts - 1) * page_size
        self.last_page_len = torch.from_numpy(last.astype(np.int32))  # int32 [num_seqs], host

    def indices(self, page_table: torch.Tensor) -> torch.Tensor:
        """int32 [num_pages], device."""
        return page_table[self._rows, self._columns]


class PlanMemory:
    """Shared plan buffers of FlashInfer wrappers, each of which runs before the next one is planned: one on the device,
    and two pinned ones that alternate. Otherwise each wrapper would have 8 MB of both.

    FlashInfer fills a pinned buffer and copies it asynchronously. The previous step may still be running when the next
    one is planned, with its copy not yet done: filling the same buffer again would change that step's plan. The buffer
    of the plan before that is free after its copy's event, which has usually passed long ago.
    """

    def __init__(self, wrapper: Any) -> None:
        """wrapper: one of the wrappers, whose buffers are used."""
        # Private names of FlashInfer; its public reset would allocate pinned memory in every step.
        self._device, first = wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
        self._pinned = (first, torch.empty_like(first, pin_memory=first.is_pinned()))
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def plan(self, wrapper: Any, *arguments: Any, **options: Any) -> None:
        """`wrapper.plan`, kept here."""
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        wrapper._int_workspace_buffer = self._device
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        wrapper.plan(*arguments, **options)
        self._copied[self._turn].record()


class FlashInferBackend(AttentionBackend):
    """Decode runs on tensor cores unless FLASHINFER_USE_TENSOR_CORES=0: on an H200 they are faster from 2 query heads
    per KV head on, not only from 4 as in FlashInfer's own heuristic."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup, workspace: torch.Tensor | None = None) -> None:
        """`workspace`: uint8 [_WORKSPACE_BYTES], zeros."""
        super().__init__(spec, group)
        import flashinfer

        self._flashinfer = flashinfer
        self._tensor_cores = spec.flashinfer_tensor_cores is not False
        self._workspace = _zeros(spec) if workspace is None else workspace
        self.prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self.decode_wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores
        )
        self.captured: dict[int, Any] = {}  # wrappers by batch size
        # Each step has at most one plan of either kind.
        self._prefill_memory, self._decode_memory = PlanMemory(self.prefill_wrapper), PlanMemory(self.decode_wrapper)
        self._window_left = -1 if group.window is None else group.window - 1
        self._graph_indices: torch.Tensor | None = None
        self.pages: Pages  # of the last plan

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        workspace = _zeros(spec)
        planned: dict[LayerGroup, FlashInferBackend] = {}
        backends: list[AttentionBackend] = []
        for group in groups:
            alike = replace(group, layers=(), cache_group=0)
            if alike in planned:
                backends.append(_PlannedBefore(spec, group, planned[alike]))
            else:
                planned[alike] = cls(spec, group, workspace)
                backends.append(planned[alike])
        return backends

    def plan_prefill(self, inputs: PrefillInputs) -> Any:
        spec, group = self.spec, self.group
        self.pages = pages = Pages(inputs.kv_lens_host, inputs.rows, spec.page_size, spec.device)
        self._prefill_memory.plan(
            self.prefill_wrapper, torch.from_numpy(inputs.cu_seqlens_q_host), pages.indptr,
            pages.indices(inputs.page_table), pages.last_page_len, group.num_q_heads, group.num_kv_heads,
            group.head_dim, spec.page_size, causal=True, sm_scale=group.softmax_scale, window_left=self._window_left,
            q_data_type=spec.dtype, kv_data_type=group.kv.dtype, logits_soft_cap=group.soft_cap,
        )  # fmt: skip
        return self.prefill_wrapper

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        return _run(layer, q, plan)

    def plan_decode(self, inputs: DecodeInputs) -> Any:
        return self._plan_decode(self.decode_wrapper, inputs)

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        return _run(layer, q, plan)

    def allocate_graph(self, max_batch_size: int) -> None:
        self._graph_indices = graph_indices(self.spec, max_batch_size, self._graph_indices)

    def plan_capture(self, inputs: DecodeInputs) -> Any:
        batch, device = inputs.batch_size, self.spec.device
        if batch not in self.captured:
            self.captured[batch] = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_cuda_graph=True, use_tensor_cores=self._tensor_cores,
                paged_kv_indptr_buffer=torch.zeros(batch + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=self._graph_indices,
                paged_kv_last_page_len_buffer=torch.ones(batch, dtype=torch.int32, device=device),
            )  # fmt: skip
        return self._plan_decode(self.captured[batch], inputs)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._plan_decode(self.captured[inputs.batch_size], inputs)

    def _plan_decode(self, wrapper: Any, inputs: DecodeInputs) -> Any:
        spec, group = self.spec, self.group
        self.pages = pages = Pages(inputs.kv_lens_host, inputs.rows, spec.page_size, spec.device)
        self._decode_memory.plan(
            wrapper, pages.indptr, pages.indices(inputs.page_table), pages.last_page_len, group.num_q_heads,
            group.num_kv_heads, group.head_dim, spec.page_size, window_left=self._window_left, q_data_type=spec.dtype,
            kv_data_type=group.kv.dtype, sm_scale=group.softmax_scale, logits_soft_cap=group.soft_cap,
        )  # fmt: skip
        return wrapper


class _PlannedBefore(AttentionBackend):
    """For layers that only differ from another group's in their page table. That group's backend is planned just before
    this one in each step; this one uses its wrappers with other page ids."""

    supports_graphs = True

    def __init__(self, spec: AttentionSpec, group: LayerGroup, first: FlashInferBackend) -> None:
        super().__init__(spec, group)
        self._first = first
        self._graph_indices: torch.Tensor | None = None

    def plan_prefill(self, inputs: PrefillInputs) -> Any:
        return _with_pages(self._first.prefill_wrapper, self._first.pages.indices(inputs.page_table))

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        return _run(layer, q, plan)

    def plan_decode(self, inputs: DecodeInputs) -> Any:
        return _with_pages(self._first.decode_wrapper, self._first.pages.indices(inputs.page_table))

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        return _run(layer, q, plan)

    def allocate_graph(self, max_batch_size: int) -> None:
        self._graph_indices = graph_indices(self.spec, max_batch_size, self._graph_indices)

    def plan_capture(self, inputs: DecodeInputs) -> Any:
        self.plan_replay(inputs)
        return _with_pages(self._first.captured[inputs.batch_size], self._graph_indices)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        assert self._graph_indices is not None, "allocate_graph comes before"
        indices = self._first.pages.indices(inputs.page_table)
        self._graph_indices[: len(indices)].copy_(indices)


def _with_pages(wrapper: Any, indices: torch.Tensor | None) -> Any:
    """Makes a planned wrapper read other pages. The attribute is private to FlashInfer, for prefill and decode wrappers
    alike."""
    other = copy.copy(wrapper)
    other._paged_kv_indices_buf = indices
    return other


def _run(layer: AttentionLayer, q: torch.Tensor, wrapper: Any) -> torch.Tensor:
    kv = layer.kv
    out: torch.Tensor = wrapper.run(q.contiguous(), (kv.k, kv.v), k_scale=kv.scales.k, v_scale=kv.scales.v)
    return out


def graph_indices(spec: AttentionSpec, max_batch_size: int, before: torch.Tensor | None) -> torch.Tensor:
    """Buffer for the page ids of a captured step's sequences, for all batch sizes: the one before if it is large
    enough, since graphs may read it."""
    size = max_batch_size * spec.max_pages_per_row
    if before is not None and len(before) >= size:
        return before
    return torch.zeros(size, dtype=torch.int32, device=spec.device)


def _zeros(spec: AttentionSpec) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
