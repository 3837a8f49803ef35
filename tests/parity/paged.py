"""Runs a model over a paged KV cache without scheduler or runner: the smallest honest caller of `models`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.attention.pair import StepAttention
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.layers.context import AuxStates, ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.models.build import attention_spec, build_model
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.fallback.build import build_fallback
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.tensor_parallel import TensorParallel
from tests.parity.paged_states import PagedStates
from tests.specs import make_pool


class PagedModel:
    """Rows get pages in a scattered order, so that a wrong page table shows."""

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int,
        max_seq_len: int = 256,
        max_rows: int = 8,
        tp: TensorParallel | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        model_impl: str = "native",
        quantization: str | None = None,
        merge: Any = None,
    ) -> None:
        """merge: see `LoadConfig`."""
        tp = tp or TensorParallel.single()
        config = load_model_config(folder, model_impl)
        self.device = torch.device(device)
        self.spec = attention_spec(
            config,
            AttentionSpec(
                page_size=page_size, max_seq_len=max_seq_len, max_rows=max_rows, dtype=dtype, device=self.device
            ),
            tp_size=tp.size,
        )
        load = LoadConfig(
            dtype=dtype, device=self.device, max_seq_len=max_seq_len, tp=tp, quantization=quantization, merge=merge
        )
        if model_impl == "transformers":
            self.model: Any = build_fallback(config, folder, load)
        else:
            self.model = build_model(config, folder, load)
        columns = self.spec.columns
        shape = len(columns.kinds), max_rows, self.spec.max_pages_per_row // columns.kernel_pages
        num_pages = math.prod(shape)
        self.pool = make_pool(self.spec, num_pages)
        self.model.bind_attention(self.spec, self.pool)
        self.states = PagedStates.of(config, self.spec, tp.size)
        if self.states is not None:
            self.model.bind_states(self.states.pool)
        self.attention = create_attention("torch", "torch", self.spec)
        order = np.random.default_rng(7).permutation(num_pages) + 1
        entries = (*(index.reshape(-1).astype(np.int32) for index in np.indices(shape)), order.astype(np.int32))
        groups, rows, places, pages = columns.kernel_entries(*entries)
        tables = np.zeros((columns.num_groups, max_rows, self.spec.max_pages_per_row), dtype=np.int32)
        tables[groups, rows, places] = pages
        self.page_tables = torch.from_numpy(tables).to(self.device)
        self.lengths = [0] * max_rows
        self.tokens: list[list[int]] = [[] for _ in range(max_rows)]

    def share_prefix(self, source: int, target: int, num_pages: int) -> None:
        """Lets row `target` begin with the first pages of row `source`, as a prefix cache would."""
        self.page_tables[:, target, :num_pages] = self.page_tables[:, source, :num_pages]
        self.lengths[target] = num_pages * self.spec.page_size
        self.tokens[target] = self.tokens[source][: self.lengths[target]]
        if self.states is not None:
            self.states.share_prefix(source, target, num_pages)

    @torch.inference_mode()
    def step(
        self,
        prefill: dict[int, list[int]],
        decode: dict[int, int],
        *,
        last_only: bool = False,
        aux: AuxStates | None = None,
        change: Callable[[ModelInput], ModelInput] = lambda tokens: tokens,
    ) -> dict[int, torch.Tensor]:
        """Computes chunks (`prefill`, by row) and single tokens (`decode`, by row) in one mixed forward pass.

        Returns the logits of every token, [num_tokens of the row, vocab_size], by row; `last_only`: of the last one.
        `aux` gets further hidden states, of the tokens of `prefill`, then of `decode`. `change`: of the pass's input.
        """
        again = dict.fromkeys([*prefill, *decode], 0)  # tokens of each row that are computed once more
        if self.states is not None:
            self.states.fold({row: self.lengths[row] for row in again})
            for row in prefill:  # whose chunk begins with its page
                again[row] = self.lengths[row] % self.spec.page_size
                self.lengths[row] -= again[row]
            prefill = {row: self.tokens[row][self.lengths[row] :] + tokens for row, tokens in prefill.items()}
            self.tokens = [tokens[:length] for tokens, length in zip(self.tokens, self.lengths, strict=True)]
        new = {**prefill, **{row: [token] for row, token in decode.items()}}
        positions = {row: range(self.lengths[row], self.lengths[row] + len(tokens)) for row, tokens in new.items()}
        for row, tokens in new.items():
            self.lengths[row] += len(tokens)
            self.tokens[row] += tokens
        page_size = self.spec.page_size
        slots = [
            [
                int(table[row, position // page_size]) * page_size + position % page_size
                for row in new
                for position in positions[row]
            ]
            for table in self.page_tables
        ]
        counts = [len(tokens) for tokens in new.values()]
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1 if last_only else None
        plan = self.attention.plan(self._prefill_inputs(prefill), self._decode_inputs(list(decode)))
        ctx = ForwardContext(
            slots=tuple(torch.tensor(slots, device=self.device)),
            attention=StepAttention(self.attention, plan),
            logits_indices=last,
            aux=aux,
        )
        input_ids = torch.tensor([token for tokens in new.values() for token in tokens], device=self.device)
        flat_positions = torch.tensor([position for row in new for position in positions[row]], device=self.device)
        given = change(ModelInput(input_ids, flat_positions))
        adapters = given.by_row if given.by_row is None or last is None else given.by_row[last]
        logits = self.model.logits(self.model(given, ctx), adapters).cpu()
        parts = zip(new, logits.split([1] * len(new) if last_only else counts), strict=True)
        return {row: part if last_only else part[again[row] :] for row, part in parts}

    def _prefill_inputs(self, prefill: dict[int, list[int]]) -> PrefillInputs | None:
        if not prefill:
            return None
        cu_seqlens = np.cumsum([0] + [len(tokens) for tokens in prefill.values()]).astype(np.int32)
        rows = np.array(list(prefill), dtype=np.int32)
        kv_lens = np.array([self.lengths[row] for row in prefill], dtype=np.int32)
        return PrefillInputs(
            cu_seqlens_q=torch.from_numpy(cu_seqlens).to(self.device),
            kv_lens=torch.from_numpy(kv_lens).to(self.device),
            rows=torch.from_numpy(rows).to(self.device),
            page_table=self.page_tables[0],
            page_tables=tuple(self.page_tables),
            cu_seqlens_q_host=cu_seqlens,
            kv_lens_host=kv_lens,
            rows_host=rows,
            chunks=None if self.states is None else self.states.chunks(rows, kv_lens - np.diff(cu_seqlens), kv_lens),
        )

    def _decode_inputs(self, rows: list[int]) -> DecodeInputs | None:
        if not rows:
            return None
        kv_lens = np.array([self.lengths[row] for row in rows], dtype=np.int32)
        row_array = np.array(rows, dtype=np.int32)
        return DecodeInputs(
            kv_lens=torch.from_numpy(kv_lens).to(self.device),
            rows=torch.from_numpy(row_array).to(self.device),
            page_table=self.page_tables[0],
            page_tables=tuple(self.page_tables),
            kv_lens_host=kv_lens,
            rows_host=row_array,
            states=None if self.states is None else self.states.tables,
        )
