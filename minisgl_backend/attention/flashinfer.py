"""The `fi` backend: FlashInfer's paged prefill and decode (Ye et al., 2025), any power-of-two page size.

FlashInfer plans on the host: lengths come from the host arrays of the inputs, page ids are gathered on the device, and
nothing waits for the device.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, DecodeInputs, LayerGroup, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer

_WORKSPACE_BYTES = 256 << 20
_PREBUILT = "flashinfer_jit_cache"  # a package that has its kernels compiled


def prepare_kernels() -> bool:
    """Sees to it that FlashInfer's kernels can be had, which it compiles at their first use: in the first step.

    True where they are installed, were compiled before, or can be. Else raises FileNotFoundError naming what is
    missing, by the rules of FlashInfer's jit/cpp_ext.py.
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
    """FlashInfer's requirements install it beside this Python, which is on PATH where the environment was activated."""
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside) is not None:
        os.environ["PATH"] = os.pathsep.join([*filter(None, [os.environ.get("PATH")]), beside])


@dataclass(frozen=True)
class Pages:
    """The pages of a batch, flattened."""

    indptr: torch.Tensor  # int32 [num_seqs + 1], host
    indices: torch.Tensor  # int32 [num_pages], device
    last_page_len: torch.Tensor  # int32 [num_seqs], host


class Planner:
    """A wrapper and two pinned buffers for its plans, used in turn.

    FlashInfer fills one pinned buffer of its own and copies it asynchronously. The step before may still be running
    when the next one is planned, its copy not yet done: filling the same buffer again would change that step's plan.
    The buffer of two plans ago is free once its copy's event has passed, which it has long since.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        # The name is private to FlashInfer; its public reset would allocate pinned memory anew for every step.
        first = wrapper._pin_memory_int_workspace_buffer
        self._buffers = (first, torch.empty_like(first, pin_memory=True))
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def plan(self, *arguments: Any, **options: Any) -> None:
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        self.wrapper._pin_memory_int_workspace_buffer = self._buffers[self._turn]
        self.wrapper.plan(*arguments, **options)
        self._copied[self._turn].record()


class FlashInferBackend(AttentionBackend):
    """Decode runs on tensor cores unless FLASHINFER_USE_TENSOR_CORES=0: on an H200 they are faster from 2 query
    heads a KV head on, not only from 4 as FlashInfer's own rule has it."""

    def __init__(self, spec: AttentionSpec, group: LayerGroup, workspace: torch.Tensor | None = None) -> None:
        """`workspace`: uint8 [_WORKSPACE_BYTES], zeros."""
        super().__init__(spec, group)
        import flashinfer

        self._flashinfer = flashinfer
        self._tensor_cores = spec.flashinfer_tensor_cores is not False
        self._workspace = _zeros(spec) if workspace is None else workspace
        self._prefill = Planner(flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND"))
        self._decode = Planner(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=self._tensor_cores)
        )
        self._window_left = -1 if group.window is None else group.window - 1
        self._graph_planners: dict[int, Planner] = {}
        self._graph_indices: torch.Tensor | None = None

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        workspace = _zeros(spec)
        return [cls(spec, group, workspace) for group in groups]

    def plan_prefill(self, inputs: PrefillInputs) -> Any:
        pages = flatten_pages(inputs.kv_lens_host, inputs.rows, inputs.page_table, self.spec.page_size)
        spec, group = self.spec, self.group
        self._prefill.plan(
            torch.from_numpy(inputs.cu_seqlens_q_host), pages.indptr, pages.indices, pages.last_page_len,
            group.num_q_heads, group.num_kv_heads, group.head_dim, spec.page_size, causal=True,
            sm_scale=group.softmax_scale, window_left=self._window_left, q_data_type=spec.dtype,
            kv_data_type=group.kv.dtype, logits_soft_cap=group.soft_cap,
        )  # fmt: skip
        return self._prefill.wrapper

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        out: torch.Tensor = plan.run(
            q.contiguous(), (layer.kv.k, layer.kv.v), k_scale=layer.kv.scales.k, v_scale=layer.kv.scales.v
        )
        return out

    def plan_decode(self, inputs: DecodeInputs) -> Any:
        self._plan_decode(self._decode, inputs)
        return self._decode.wrapper

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Any) -> torch.Tensor:
        return self.prefill(layer, q, plan)

    def allocate_graph(self, max_batch_size: int) -> None:
        most = max_batch_size * self.spec.max_pages_per_row
        self._graph_indices = torch.zeros(most, dtype=torch.int32, device=self.spec.device)

    def plan_capture(self, inputs: DecodeInputs) -> Any:
        batch, device = inputs.batch_size, self.spec.device
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_cuda_graph=True, use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(batch + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=self._graph_indices,
            paged_kv_last_page_len_buffer=torch.ones(batch, dtype=torch.int32, device=device),
        )  # fmt: skip
        self._graph_planners[batch] = Planner(wrapper)
        self._plan_decode(self._graph_planners[batch], inputs)
        return wrapper

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._plan_decode(self._graph_planners[inputs.batch_size], inputs)

    def _plan_decode(self, planner: Planner, inputs: DecodeInputs) -> None:
        pages = flatten_pages(inputs.kv_lens_host, inputs.rows, inputs.page_table, self.spec.page_size)
        spec, group = self.spec, self.group
        planner.plan(
            pages.indptr, pages.indices, pages.last_page_len, group.num_q_heads, group.num_kv_heads, group.head_dim,
            spec.page_size, window_left=self._window_left, q_data_type=spec.dtype, kv_data_type=group.kv.dtype,
            sm_scale=group.softmax_scale, logits_soft_cap=group.soft_cap,
        )  # fmt: skip


def flatten_pages(
    kv_lens: np.ndarray[Any, np.dtype[np.int32]], rows: torch.Tensor, table: torch.Tensor, page_size: int
) -> Pages:
    """Of sequences of these lengths, whose rows of the page table are `rows`; without waiting for the device."""
    counts = (kv_lens + page_size - 1) // page_size
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    # One upload for both; `output_size` spares repeat_interleave a look at the device.
    uploaded = torch.from_numpy(np.concatenate([counts, indptr[:-1]]).astype(np.int32)).pin_memory()
    counts_device, starts = uploaded.to(table.device, non_blocking=True).chunk(2)
    total = int(indptr[-1])
    line = torch.repeat_interleave(torch.arange(len(counts), device=table.device), counts_device, output_size=total)
    column = torch.arange(total, device=table.device, dtype=torch.int32) - starts[line]
    indices = table[rows[line], column]
    last = kv_lens - (counts - 1) * page_size
    return Pages(torch.from_numpy(indptr), indices, torch.from_numpy(last.astype(np.int32)))


def _zeros(spec: AttentionSpec) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
