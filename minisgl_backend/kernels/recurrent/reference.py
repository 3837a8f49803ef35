"""Kernels of the gated delta rule in torch, on any device: the contract, and what a CPU runs.

Sums, states and norms are in the states' dtype, float32. What a convolution leaves is rounded to the model's dtype, as
tails hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.recurrent.calls import (
    L2_EPS,
    Block,
    ChunkBatch,
    ChunkRow,
    DeltaLayer,
    FoldBatch,
    WindowBatch,
)
from minisgl_backend.kv.state import LayerState


class _Inputs(NamedTuple):
    """Of tokens, in the states' dtype."""

    q: torch.Tensor  # [num_tokens, num_v_heads, k_dim], normed and scaled
    k: torch.Tensor  # [num_tokens, num_v_heads, k_dim], normed
    v: torch.Tensor  # [num_tokens, num_v_heads, v_dim]
    g: torch.Tensor  # [num_tokens, num_v_heads]
    beta: torch.Tensor  # [num_tokens, num_v_heads]


def delta_window(
    x: torch.Tensor, layer: DeltaLayer, batch: WindowBatch, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A step's decode part: convolution, window, gated norm; appends to tails and writes no slot.

    x: inputs of the entries, [num_entries, num_inputs] -> [num_entries, num_v_heads * v_dim] in x's dtype, in `out`
    (contiguous) where given.
    """
    out = x.new_empty(len(x), layer.config.num_v_heads * layer.config.v_dim) if out is None else out
    for entries in _ranks(batch):
        out[entries] = _window(x[entries], layer, batch, entries)
    return out


def _ranks(batch: WindowBatch) -> list[torch.Tensor]:
    """Indices of the entries that can be computed at once: all first ones of rows, all second ones, and so on."""
    count = len(batch.rows)
    index = torch.arange(count, device=batch.rows.device)
    if not batch.has_drafts or count == 0:
        return [index]
    # Entries of padding, whose positions do not rise, are each a first one.
    follows = (batch.rows[1:] == batch.rows[:-1]) & (batch.kv_lens[1:] == batch.kv_lens[:-1] + 1)
    firsts = torch.cat([index[:1], torch.where(follows, 0, index[1:])]).cummax(0).values
    rank = index - firsts
    return [index[rank == one] for one in range(int(rank.max()) + 1)]


def _window(x: torch.Tensor, layer: DeltaLayer, batch: WindowBatch, entries: torch.Tensor) -> torch.Tensor:
    """Entries of different rows."""
    config, state = layer.config, layer.state
    rows = batch.rows[entries].long()
    position = batch.kv_lens[entries].long() - 1
    border = batch.state_border[rows].long()
    slot = batch.state_slot[rows].long()
    # The convolution, over the ring of raw inputs.
    ring = state.tail_conv.shape[1]
    channels = config.conv_channels
    state.tail_conv[rows, position % ring] = x[:, :channels]
    seen = position[:, None] + torch.arange(1 - config.conv_width, 1, device=x.device)
    raw = torch.where((seen >= 0)[..., None], state.tail_conv[rows[:, None], seen % ring], 0)
    mixed = F.silu(_dot_taps(raw, layer)).to(x.dtype)
    one = _inputs(mixed, x, layer)
    # The tail before the token.
    length = state.tail_u.shape[2]
    count = max(0, int((position - border).max())) if len(rows) else 0  # before: where a start times steps
    j = border[:, None] + torch.arange(count, device=x.device)
    ok, at = (j < position[:, None])[:, None, :], j % length
    u = torch.where(ok[..., None], _of_ring(state.tail_u, rows, at), 0)
    g = torch.where(ok, _of_ring(state.tail_g, rows, at), 0)
    k = _normed(torch.where(ok[..., None], _of_ring(state.tail_k, rows, at), 0).to(u.dtype))
    k = k.repeat_interleave(config.num_v_heads // config.num_k_heads, dim=1)
    total = g.cumsum(-1)
    decay = (total[..., -1:] if count else one.g.new_zeros(*one.g.shape, 1)) + one.g[..., None]  # e^G of the token
    weight = (decay - total).exp()
    states = torch.where((slot > 0)[:, None, None, None], state.states[slot], 0)
    both = torch.stack([one.k, one.q], dim=2)  # [n, heads, 2, k_dim]
    seen_k, seen_q = (
        decay.exp()[..., None] * (both @ states) + ((both @ k.transpose(-1, -2)) * weight[:, :, None]) @ u
    ).unbind(2)
    new = one.beta[..., None] * (one.v - seen_k)
    o = seen_q + (one.q * one.k).sum(-1, keepdim=True) * new
    place = position % length
    state.tail_k[rows, :, place] = mixed[:, _keys(layer)].unflatten(1, (config.num_k_heads, config.k_dim))
    state.tail_u[rows, :, place] = new
    state.tail_g[rows, :, place] = one.g
    return gated_norm(o.to(x.dtype), x, layer)


def _of_ring(ring: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """ring [num_rows, heads, length, ...], rows [n], at [n, count] -> [n, heads, count, ...]."""
    return ring[rows[:, None], :, at].transpose(1, 2)


def delta_fold(stack: LayerState, batch: FoldBatch, page_size: int) -> None:
    """Moves rows' states to later borders; all layers of `StatePool.stacks[i]` at once. Reads tails and writes slots,
    with the raw inputs before the border."""
    width, length, ring = stack.conv.shape[2] + 1, stack.tail_u.shape[3], stack.tail_conv.shape[2]
    group = stack.tail_u.shape[2] // stack.tail_k.shape[2]
    starts = batch.state_border[batch.rows.long()]
    folds = (batch.rows, batch.sources, batch.targets, starts, batch.borders)
    for row, source, target, start, border in zip(*(part.tolist() for part in folds), strict=True):
        states = stack.states[:, source] if source else torch.zeros_like(stack.states[:, 0])
        for page in range(start, border, page_size):
            at = torch.arange(page, page + page_size, device=states.device) % length
            total = stack.tail_g[:, row][:, :, at].cumsum(-1)  # [layers, heads, page_size]
            k = _normed(stack.tail_k[:, row][:, :, at].to(states.dtype)).repeat_interleave(group, dim=1)
            u = stack.tail_u[:, row][:, :, at] * (total[..., -1:] - total).exp()[..., None]
            states = total[..., -1].exp()[..., None, None] * states + k.transpose(-1, -2) @ u
        stack.states[:, target] = states
        seen = torch.arange(border - width + 1, border, device=states.device)
        stack.conv[:, target] = torch.where((seen >= 0)[:, None], stack.tail_conv[:, row][:, seen % ring], 0)


def conv_prefill(x: torch.Tensor, layer: DeltaLayer, batch: ChunkBatch) -> torch.Tensor:
    """The convolution of a step's chunks and its activation (silu); writes nothing else.

    x: [num_tokens, num_inputs] -> [num_tokens, conv_channels], in x's dtype.
    """
    out = []
    for chunk in _chunks(batch):
        raw = _raw(x, layer, chunk)
        windows = raw.unfold(0, layer.config.conv_width, 1).transpose(1, 2)  # [length, w, c]
        out.append(F.silu(_dot_taps(windows, layer)).to(x.dtype))
    return torch.cat(out)


def delta_chunk(mixed: torch.Tensor, x: torch.Tensor, layer: DeltaLayer, batch: ChunkBatch) -> torch.Tensor:
    """The delta rule over a step's chunks. Writes their states to targets and checkpoints, with the raw inputs before
    these borders, and of tokens behind the last border what a row's tail holds.

    mixed: of `conv_prefill`; x: the same inputs as there -> [num_tokens, num_v_heads * v_dim], in x's dtype.
    """
    tokens = _inputs(mixed, x, layer)
    out = torch.empty_like(tokens.v)
    blocks = [Block(*columns) for columns in batch.blocks.tolist()]
    for chunk in _chunks(batch):
        states = layer.state.states[chunk.source]
        states = states.clone() if chunk.source else torch.zeros_like(states)
        # Read before a target is written, which may be the source.
        raw = _raw(x, layer, chunk)
        for index, block in enumerate(blocks[chunk.block : chunk.block + chunk.num_blocks]):
            if index == chunk.num_body:
                _keep(states, raw, layer, chunk.target, block.token - chunk.token)
            part = slice(block.token, block.token + block.length)
            out[part], u, states = _block(_Inputs(*(tensor[part] for tensor in tokens)), states)
            if block.is_tail:
                _append(mixed[part], u, tokens.g[part], layer, chunk.row, block.position)
            if block.checkpoint:
                _keep(states, raw, layer, block.checkpoint, block.token + block.length - chunk.token)
        if chunk.num_body == chunk.num_blocks:
            _keep(states, raw, layer, chunk.target, chunk.length)
        width, end = layer.config.conv_width, chunk.position + chunk.length
        places = torch.arange(end - width + 1, end, device=x.device) % layer.state.tail_conv.shape[1]
        layer.state.tail_conv[chunk.row, places] = raw[chunk.length :]
    return out.to(x.dtype).flatten(1)


def _block(tokens: _Inputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and u of one block's tokens, both [length, heads, v_dim], and the states behind it."""
    q, k, v = (part.transpose(0, 1) for part in tokens[:3])  # [heads, length, dim]
    g, beta = tokens.g.T, tokens.beta.T[..., None]
    total = g.cumsum(-1)
    later = torch.ones(len(tokens.g), len(tokens.g), dtype=torch.bool, device=q.device).tril()
    decay = torch.where(later, total[..., None] - total[:, None], -torch.inf).exp()
    e = total.exp()[..., None]
    system = beta * (k @ k.transpose(1, 2)) * decay  # the solver takes its diagonal as ones
    u = torch.linalg.solve_triangular(system, beta * (v - e * (k @ states)), upper=False, unitriangular=True)
    out = e * (q @ states) + ((q @ k.transpose(1, 2)) * decay) @ u
    rest = (total[:, -1:] - total).exp()[..., None]
    states = e[:, -1:] * states + (k * rest).transpose(1, 2) @ u
    return out.transpose(0, 1), u.transpose(0, 1), states


def gated_norm(o: torch.Tensor, x: torch.Tensor, layer: DeltaLayer, out: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm of each head's output, times silu(z). o: [num_tokens, num_v_heads * v_dim] or with heads apart; x: the
    tokens' inputs -> [num_tokens, num_v_heads * v_dim], in x's dtype, in `out` (contiguous) where given."""
    config, dtype = layer.config, layer.state.states.dtype
    o = o.view(len(x), config.num_v_heads, config.v_dim).to(dtype)
    start = config.conv_channels
    z = x[:, start : start + config.num_v_heads * config.v_dim].view_as(o).to(dtype)
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + layer.norm_eps)
    gated = ((normed * layer.norm_weight).to(x.dtype).to(dtype) * F.silu(z)).to(x.dtype).flatten(1)
    return gated if out is None else out.copy_(gated)


def _inputs(mixed: torch.Tensor, x: torch.Tensor, layer: DeltaLayer) -> _Inputs:
    """mixed [n, conv_channels]: what the convolution leaves of x [n, num_inputs]."""
    config, dtype = layer.config, layer.state.states.dtype
    group, size = config.num_v_heads // config.num_k_heads, config.num_k_heads * config.k_dim
    q, k, v = mixed.to(dtype).split([size, size, config.num_v_heads * config.v_dim], dim=1)
    q, k = (
        _normed(part.unflatten(1, (config.num_k_heads, config.k_dim))).repeat_interleave(group, dim=1)
        for part in (q, k)
    )
    b, a = x[:, -2 * config.num_v_heads :].to(dtype).chunk(2, dim=1)
    g = -layer.a_log.to(dtype).exp() * F.softplus(a + layer.dt_bias)
    v = v.unflatten(1, (config.num_v_heads, config.v_dim))
    return _Inputs(q * config.k_dim**-0.5, k, v, g, layer.beta_scale * b.sigmoid())


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _dot_taps(raw: torch.Tensor, layer: DeltaLayer) -> torch.Tensor:
    """raw [n, w, c], oldest first -> [n, c] in the states' dtype."""
    dtype = layer.state.states.dtype
    return (raw.to(dtype) * layer.conv_weight.to(dtype)).sum(1)


def _keys(layer: DeltaLayer) -> slice:
    size = layer.config.num_k_heads * layer.config.k_dim
    return slice(size, 2 * size)


def _chunks(batch: ChunkBatch) -> list[ChunkRow]:
    return [ChunkRow(*columns) for columns in batch.sequences.tolist()]


def _raw(x: torch.Tensor, layer: DeltaLayer, chunk: ChunkRow) -> torch.Tensor:
    """Raw inputs of the w - 1 tokens before the chunk and of its own, [w - 1 + length, c]."""
    kept = layer.state.conv[chunk.source]
    history = kept if chunk.source else torch.zeros_like(kept)
    return torch.cat([history, x[chunk.token : chunk.token + chunk.length, : layer.config.conv_channels]])


def _keep(states: torch.Tensor, raw: torch.Tensor, layer: DeltaLayer, slot: int, length: int) -> None:
    """Writes the state behind a chunk's first `length` tokens to a slot. raw: history and inputs of the chunk."""
    layer.state.states[slot] = states
    layer.state.conv[slot] = raw[length : length + layer.config.conv_width - 1]


def _append(mixed: torch.Tensor, u: torch.Tensor, g: torch.Tensor, layer: DeltaLayer, row: int, position: int) -> None:
    """Writes tokens from `position` on to a row's tail."""
    config, state = layer.config, layer.state
    places = torch.arange(position, position + len(u), device=u.device) % state.tail_u.shape[2]
    keys = mixed[:, _keys(layer)].unflatten(1, (config.num_k_heads, config.k_dim))
    state.tail_k[row, :, places] = keys.transpose(0, 1)
    state.tail_u[row, :, places] = u.transpose(0, 1)
    state.tail_g[row, :, places] = g.T
