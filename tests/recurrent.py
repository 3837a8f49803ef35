"""Rows of the gated delta rule: what kernels are given step by step, and the plain recurrence that they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.recurrent import reference
from minisgl_backend.kernels.recurrent.calls import (
    L2_EPS,
    ChunkBatch,
    ChunkSpan,
    DeltaLayer,
    FoldBatch,
    WindowBatch,
    chunk_tables,
)
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.kv.state_config import StateConfig


def small(group: int = 2, k_dim: int = 16, v_dim: int = 16, num_k_heads: int = 2, width: int = 4) -> StateConfig:
    """Sizes for tests; group: value heads of a key head."""
    return StateConfig(
        num_k_heads=num_k_heads, num_v_heads=group * num_k_heads, k_dim=k_dim, v_dim=v_dim, conv_width=width
    )


def plain(x: torch.Tensor, layer: DeltaLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence token by token, x [num_tokens, num_inputs] -> outputs [num_tokens, num_v_heads * v_dim] in x's dtype
    and the states after each token [num_tokens + 1, num_v_heads, k_dim, v_dim]."""
    config, dtype = layer.config, layer.state.states.dtype
    group, channels, size = config.num_v_heads // config.num_k_heads, config.conv_channels, config.num_v_heads
    raw = F.pad(x[:, :channels].to(dtype), (0, 0, config.conv_width - 1, 0))
    taps = [raw[i : i + len(x)] * layer.conv_weight[i].to(dtype) for i in range(config.conv_width)]
    mixed = F.silu(sum(taps[1:], taps[0])).to(x.dtype).to(dtype)
    q, k, v = mixed.split([config.num_k_heads * config.k_dim] * 2 + [size * config.v_dim], 1)
    q, k = (part.unflatten(1, (config.num_k_heads, -1)).repeat_interleave(group, 1) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for part in (q, k))
    v = v.unflatten(1, (size, -1))
    b, a = x[:, -2 * size : -size].to(dtype), x[:, -size:].to(dtype)
    decay = (-layer.a_log.to(dtype).exp() * F.softplus(a + layer.dt_bias)).exp()
    beta = layer.beta_scale * b.sigmoid()
    state = x.new_zeros(size, config.k_dim, config.v_dim, dtype=dtype)
    states, out = [state], []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state
        u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * u[:, None]
        states.append(state)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * config.k_dim**-0.5)
    return reference.gated_norm(torch.stack(out).to(x.dtype), x, layer), torch.stack(states)


class RecurrentRows:
    """Rows of one model with states, all of whose memory is NaN at first. Row i has slot i + 1, and its inputs are
    `inputs[i]`; it is computed up to `lengths[i]`. ops: the module of the kernels."""

    def __init__(
        self,
        config: StateConfig,
        *,
        num_rows: int = 3,
        num_tokens: int = 100,
        page_size: int = 16,
        max_drafts: int = 0,
        dtype: torch.dtype = torch.float64,
        state_dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        ops: Any = reference,
        num_layers: int = 1,
        beta_scale: float = 1.0,
    ) -> None:
        self.config, self.page_size, self.max_drafts, self.ops = config, page_size, max_drafts, ops
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(0)
        layout = StateLayout((config,) * num_layers, dtype, state_dtype)
        self.pool = StatePool(
            layout, page_size=page_size, max_drafts=max_drafts, num_slots=2 * num_rows + 2, num_rows=num_rows + 1,
            device=self.device,
        )  # fmt: skip
        for tensor in self.pool.stacks[0]:
            tensor.fill_(torch.nan)
        heads = config.num_v_heads
        self.layers = [
            DeltaLayer(
                config=config,
                conv_weight=self._normal(config.conv_width, config.conv_channels).to(dtype),
                a_log=self._normal(heads).to(state_dtype) - 2,
                dt_bias=self._normal(heads).to(state_dtype),
                norm_weight=(1 + 0.1 * self._normal(config.v_dim)).to(dtype),
                norm_eps=1e-6,
                state=self.pool.layer(index),
                page_size=page_size,
                beta_scale=beta_scale,
            )
            for index in range(num_layers)
        ]
        self.inputs = [self._normal(num_tokens + max_drafts, config.num_inputs).to(dtype) for _ in range(num_rows)]
        self.lengths = [0] * num_rows
        # The last row pads.
        self.slots = torch.tensor([*range(1, num_rows + 1), 0], dtype=torch.int32, device=self.device)
        self.borders = torch.zeros(num_rows + 1, dtype=torch.int32, device=self.device)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.device)

    def expected(self, row: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of the row's inputs, by the recurrence."""
        return plain(self.inputs[row], self.layers[layer])

    def prefill(
        self,
        chunks: dict[int, int],
        checkpoints: dict[int, Sequence[tuple[int, int]]] | None = None,
        fresh: bool = True,
    ) -> dict[int, torch.Tensor]:
        """Computes each row up to the given length in one step -> its outputs. fresh: rows at 0 read slot 0, not their
        own."""
        spans, parts = [], []
        for row, end in chunks.items():
            start, slot = self.lengths[row], int(self.slots[row])
            source = 0 if fresh and start == 0 else slot
            spans.append(ChunkSpan(row, start, end, source, slot, (checkpoints or {}).get(row, ())))
            parts.append(self.inputs[row][start:end])
            self.lengths[row], self.borders[row] = end, end // self.page_size * self.page_size
        tables = (torch.from_numpy(table).to(self.device) for table in chunk_tables(spans, self.page_size))
        batch, x = ChunkBatch(*tables), torch.cat(parts)
        for layer in self.layers:
            mixed = self.ops.conv_prefill(x, layer, batch)
            out = self.ops.gated_norm(self.ops.delta_chunk(mixed, x, layer, batch), x, layer, None)
        return dict(zip(chunks, out.split([len(part) for part in parts]), strict=True))

    def fold(self, targets: dict[int, int] | None = None) -> None:
        """As a plan orders it before rows' next tokens. targets: slots of rows that get another one."""
        due = [i for i, n in enumerate(self.lengths) if n // self.page_size * self.page_size > int(self.borders[i])]
        if not due:
            return
        rows = torch.tensor(due, dtype=torch.int32, device=self.device)
        sources, before = self.slots[rows.long()].clone(), self.borders.clone()
        for row in due:
            self.slots[row] = (targets or {}).get(row, int(self.slots[row]))
            self.borders[row] = self.lengths[row] // self.page_size * self.page_size
        batch = FoldBatch(rows, sources, self.slots[rows.long()], before, self.borders[rows.long()])
        for stack in self.pool.stacks:
            self.ops.delta_fold(stack, batch, self.page_size)

    def decode(
        self, drafts: dict[int, int], wrong: dict[int, int] | None = None, padding: int = 0, attempts: int = 1
    ) -> dict[int, torch.Tensor]:
        """A step of these rows, each with so many drafts, of which the last `wrong` are not what comes next. Rows are
        longer by what was accepted -> outputs of that. attempts: how often the step is made."""
        rows: list[int] = []
        lens: list[int] = []
        parts: list[torch.Tensor] = []
        for row, count in drafts.items():
            first, bad = self.lengths[row], (wrong or {}).get(row, 0)
            rows += [row] * (1 + count)
            lens += range(first + 1, first + 2 + count)
            parts.append(self.inputs[row][first : first + 1 + count - bad])
            parts.append(self._normal(bad, self.config.num_inputs).to(parts[0].dtype))
        rows += [len(self.lengths)] * padding
        lens += [1] * padding
        parts.append(self._normal(padding, self.config.num_inputs).to(parts[0].dtype))
        has_drafts = any(drafts.values())
        entry_rows, kv_lens = (torch.tensor(each, dtype=torch.int32, device=self.device) for each in (rows, lens))
        batch, x = WindowBatch(entry_rows, kv_lens, self.slots, self.borders, has_drafts), torch.cat(parts)
        for _ in range(attempts):
            for layer in self.layers:
                out = self.ops.delta_window(x, layer, batch, None)
        assert bool(out.isfinite().all())
        outputs, start = {}, 0
        for row, count in drafts.items():
            accepted = 1 + count - (wrong or {}).get(row, 0)
            outputs[row] = out[start : start + accepted]
            self.lengths[row] += accepted
            start += 1 + count
        return outputs
