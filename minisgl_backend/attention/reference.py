"""The `torch` backend: torch's scaled dot product attention over gathered pages, on CPU and GPU.

It gathers the pages of a batch into contiguous keys and values in each layer. Sequences of very different length are
computed in separate groups, so that a long one does not pad all others. It does not support CUDA graphs.

Gathered values beyond the end of a sequence are zeroed before use. A mask is not enough: the weight of a masked
position is 0, and 0 times NaN, which another sequence may have left there, is NaN.

On a CPU in 16 bits, decode steps and chunks of at most _IN_PLACE_QUERIES tokens read the pages in place
(`kernels/cpu/kernels.cpp`), one query token after the other. What else is in 16 bits
is computed in float32, but for bfloat16 where the processor has AVX-512 BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from minisgl_backend.arrays import Int32Array, Int64Array
from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, DecodeInputs, LayerGroup, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.cpu.library import cpu_library, has_bfloat16_units
from minisgl_backend.kernels.cpu.ops import HALF
from minisgl_backend.kernels.torch_ops import as_bits

_QUERY_TILE = 512  # queries that share one mask; bounds the mask to this times the context
# Query tokens of a sequence that are attended to in place, where that is possible. Measured on a Zen 4 against torch's
# attention: 0.13 to 0.6 of its time without cached tokens, 0.3 to 1.1 after 2,000. Longer chunks, after more, lose.
_IN_PLACE_QUERIES = 256
_PADDING_ALLOWED = 256  # tokens by which a sequence may be padded even if that more than doubles it
# Padded tokens that are gathered at once: bounds the temporary keys and values, which on CPU should not be evicted
# from the cache before they are read. Measured: 32 sequences of 2,000 tokens take half the time in eight groups.
_GROUP_TOKENS_CPU = 1 << 13
_GROUP_TOKENS_GPU = 1 << 18
_COMPILED_HEADS = (64, 128, 256)  # head sizes of minisgl_decode_attention
_Scratch = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class _Tile:
    """Consecutive queries of one sequence."""

    begin: int  # of the step's prefill tokens
    end: int
    kv_begin: int  # of the gathered keys
    kv_end: int
    mask: torch.Tensor | None  # [end - begin, kv_end - kv_begin], added to the scores
    causal: bool  # queries and keys begin at the same token and need no mask


@dataclass(frozen=True)
class _SequencePrefill:
    chunks: torch.Tensor  # int64 [num_kv_heads * num_pages]; see TorchBackend._chunks
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _InPlace:
    """Consecutive query tokens, each of which is attended to as in a decode step."""

    begin: int  # of the step's prefill tokens
    end: int
    page_table: torch.Tensor
    rows: torch.Tensor  # int32 [end - begin]; of page_table
    kv_lens: torch.Tensor  # int32 [end - begin]; up to and with the query token


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of similar length, padded to the longest."""

    members: torch.Tensor | None  # int64 [group]; positions in the batch; None: the whole batch in order
    chunks: torch.Tensor  # int64 [group * num_kv_heads * num_pages]
    size: int
    mask: torch.Tensor  # [group, 1, 1, padded length], added to the scores
    # Where gathered keys and values are beyond a sequence's end. On CPU int64 [num_rows], rows of them seen as
    # [group * num_kv_heads * padded length, head_dim]; on GPU bool [group, 1, padded length, 1].
    beyond: torch.Tensor


class TorchBackend(AttentionBackend):
    """Serves every head size, page size and dtype. Neither plans nor attention synchronise."""

    def __init__(self, spec: AttentionSpec, group: LayerGroup, scratch: _Scratch | None = None) -> None:
        """`scratch`: shared with other backends; see `_gather`."""
        super().__init__(spec, group)
        if group.num_q_heads % group.num_kv_heads:
            raise ConfigError(
                f"{group.num_q_heads} query heads cannot share {group.num_kv_heads} KV heads; "
                "allowed: a multiple of the KV heads"
            )
        self._num_kv_heads, self._head_dim = group.num_kv_heads, group.head_dim
        self._kv_heads = torch.arange(group.num_kv_heads, device=spec.device).view(1, -1, 1)
        self._group_tokens = _GROUP_TOKENS_CPU if spec.device.type == "cpu" else _GROUP_TOKENS_GPU
        self._scratch = {} if scratch is None else scratch  # CPU only: gathered K and V, kept from call to call
        self._heads_of_kv_head = group.num_q_heads // group.num_kv_heads
        self._is_plain = group.soft_cap is None and not group.sinks  # what torch's own attention computes
        in_16_bits = spec.device.type == "cpu" and spec.dtype in HALF and group.kv.dtype == spec.dtype
        is_served = in_16_bits and group.head_dim in _COMPILED_HEADS
        is_slow = spec.device.type == "cpu" and (
            spec.dtype == torch.float16 or (spec.dtype == torch.bfloat16 and not has_bfloat16_units())
        )
        self._dtype = torch.float32 if is_slow else spec.dtype  # of what torch computes
        self._library = cpu_library() if is_served and self._is_plain and group.chunk is None else None

    @property
    def supports_graphs(self) -> bool:  # type: ignore[override]  # other backends do whatever the model
        """Whether decode steps read nothing but what is in one place for all steps."""
        return self._library is not None

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        scratch: _Scratch = {}
        return [cls(spec, group, scratch) for group in groups]

    def plan_prefill(self, inputs: PrefillInputs) -> tuple[_SequencePrefill | _InPlace, ...]:
        plan: list[_SequencePrefill | _InPlace] = []
        for i, (kv_len, row) in enumerate(zip(inputs.kv_lens_host.tolist(), inputs.rows_host.tolist(), strict=True)):
            begin, end = int(inputs.cu_seqlens_q_host[i]), int(inputs.cu_seqlens_q_host[i + 1])
            if self._library is not None and end - begin <= _IN_PLACE_QUERIES and inputs.causal:
                lengths = torch.arange(kv_len - (end - begin) + 1, kv_len + 1, dtype=torch.int32)
                plan.append(_InPlace(begin, end, inputs.page_table, torch.full_like(lengths, row), lengths))
                continue
            first_page = int(self._first_pages(kv_len - (end - begin) + 1))
            num_pages = -(-kv_len // self.spec.page_size)
            chunks = self._chunks(inputs.page_table[row : row + 1, first_page:num_pages])
            origin = first_page * self.spec.page_size
            if not inputs.causal:
                tiles = self._tiles_of_all(begin, end, kv_len - origin)
            elif self.group.chunk is None:
                tiles = self._tiles(begin, end, kv_len - origin)
            else:
                tiles = self._tiles_of_chunks(begin, end, kv_len - origin, origin, self.group.chunk)
            plan.append(_SequencePrefill(chunks, tiles))
        return tuple(plan)

    def prefill(
        self, layer: AttentionLayer, q: torch.Tensor, plan: tuple[_SequencePrefill | _InPlace, ...]
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for sequence in plan:
            if isinstance(sequence, _InPlace):
                span = slice(sequence.begin, sequence.end)
                self._attend_in_place(layer, q[span], sequence.page_table, sequence.rows, sequence.kv_lens, out[span])
                continue
            k, v = self._gather("k", layer.kv.k, sequence.chunks, 1), self._gather("v", layer.kv.v, sequence.chunks, 1)
            for tile in sequence.tiles:
                queries = q[tile.begin : tile.end].to(self._dtype).transpose(0, 1).unsqueeze(0)
                keys, values = k[:, :, tile.kv_begin : tile.kv_end], v[:, :, tile.kv_begin : tile.kv_end]
                if self._is_plain:
                    attended = F.scaled_dot_product_attention(
                        queries,
                        keys,
                        values,
                        attn_mask=tile.mask,
                        is_causal=tile.causal,
                        scale=layer.scale * layer.kv.scales.k,
                        enable_gqa=self.group.num_q_heads != self._num_kv_heads,
                    )
                else:
                    num_queries = tile.end - tile.begin
                    mask = self._mask(num_queries, num_queries) if tile.causal else tile.mask
                    # Query heads that share keys are adjacent: [kv heads, heads of each * queries, head_dim].
                    grouped = queries.reshape(1, self._num_kv_heads, -1, self._head_dim)
                    mask = None if mask is None else mask.repeat(self._heads_of_kv_head, 1)
                    sinks = layer.sinks
                    if sinks is not None:
                        sinks = sinks.repeat_interleave(num_queries).view(self._num_kv_heads, -1, 1)
                    attended = _attention(layer, grouped, keys, values, mask, sinks).view(queries.shape)
                out[tile.begin : tile.end] = attended[0].transpose(0, 1)
        return out if layer.kv.scales.v == 1.0 else out.mul_(layer.kv.scales.v)

    def plan_decode(self, inputs: DecodeInputs) -> tuple[_DecodeGroup, ...] | DecodeInputs:
        """Groups of sequences that are gathered together; the inputs themselves where nothing is gathered."""
        if self._library is not None:
            return inputs
        first_pages = self._first_pages(inputs.kv_lens_host)
        seen = inputs.kv_lens_host - first_pages * self.spec.page_size
        groups = group_by_length(seen, self._group_tokens)
        columns = torch.from_numpy(first_pages).to(self.spec.device) if not self.group.sees_all else None
        if len(groups) == 1:
            return (self._decode_group(inputs, None, seen, columns),)
        return tuple(self._decode_group(inputs, group, seen, columns) for group in groups)

    def decode(
        self, layer: AttentionLayer, q: torch.Tensor, plan: tuple[_DecodeGroup, ...] | DecodeInputs
    ) -> torch.Tensor:
        if isinstance(plan, DecodeInputs):
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            self._attend_in_place(layer, q, plan.page_table, plan.rows, plan.kv_lens, out)
            return out
        if plan[0].members is None:
            return self._decode(layer, q, plan[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan:
            out[group.members] = self._decode(layer, q[group.members], group)
        return out

    def _attend_in_place(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out [tokens, num_q_heads, head_dim]; rows of the page table and kv_lens, int32 [tokens]: what each token
        sees, which ends with itself."""
        assert self._library is not None, "the plan looks"
        if q.stride()[1:] != (self._head_dim, 1):
            q = q.contiguous()
        self._library.minisgl_decode_attention(
            HALF[q.dtype],
            q.data_ptr(),
            q.stride(0),
            layer.kv.k.data_ptr(),
            layer.kv.v.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            rows.data_ptr(),
            kv_lens.data_ptr(),
            len(q),
            self.group.num_q_heads,
            self._num_kv_heads,
            self._head_dim,
            self.spec.page_size,
            self.group.window or 0,
            layer.scale,
            out.data_ptr(),
        )

    def _decode(self, layer: AttentionLayer, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        # Query heads that share a KV head stand in for the query positions: keys are never repeated.
        queries = q.to(self._dtype).reshape(group.size, self._num_kv_heads, -1, self._head_dim)
        k = self._cleared(self._gather("k", layer.kv.k, group.chunks, group.size), group.beyond)
        v = self._cleared(self._gather("v", layer.kv.v, group.chunks, group.size), group.beyond)
        if self._is_plain:
            scale = layer.scale * layer.kv.scales.k
            attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask, scale=scale)
        else:
            sinks = None if layer.sinks is None else layer.sinks.view(self._num_kv_heads, -1, 1)
            attended = _attention(layer, queries, k, v, group.mask, sinks)
        if layer.kv.scales.v != 1.0:
            attended.mul_(layer.kv.scales.v)
        return attended.reshape(q.shape).to(q.dtype)

    def _cleared(self, gathered: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        if beyond.dtype == torch.bool:
            return gathered.masked_fill_(beyond, 0)
        gathered.view(-1, self._head_dim).index_fill_(0, beyond, 0)
        return gathered

    def _decode_group(
        self,
        inputs: DecodeInputs,
        group: Int64Array | None,
        seen: Int32Array,
        first_pages: torch.Tensor | None,
    ) -> _DecodeGroup:
        """`seen`, int32 [batch]: tokens from each sequence's first gathered page on; `first_pages`, int32 [batch] on
        the device: index of that page; None: 0."""
        members = None if group is None else torch.from_numpy(group).to(self.spec.device)
        rows = inputs.rows if members is None else inputs.rows[members]
        kv_lens = inputs.kv_lens if members is None else inputs.kv_lens[members]
        lengths = seen if group is None else seen[group]
        num_pages = -(-int(lengths.max()) // self.spec.page_size)
        lowest = None
        if first_pages is None:
            pages = inputs.page_table[rows, :num_pages]
        else:
            first = first_pages if members is None else first_pages[members]
            origins = first * self.spec.page_size
            lowest, kv_lens = self._lowest(kv_lens) - origins, kv_lens - origins
            columns = first.unsqueeze(1) + torch.arange(num_pages, device=self.spec.device)
            pages = inputs.page_table[rows.unsqueeze(1), columns.clamp_(max=self.spec.max_pages_per_row - 1)]
        positions = torch.arange(num_pages * self.spec.page_size, device=self.spec.device)
        beyond = hidden = positions.unsqueeze(0) >= kv_lens.unsqueeze(1)
        if lowest is not None:
            hidden = beyond | (positions.unsqueeze(0) < lowest.unsqueeze(1))
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.spec.device)
        mask = mask.masked_fill_(hidden, -torch.inf).view(len(rows), 1, 1, -1)
        return _DecodeGroup(
            members,
            self._chunks(pages),
            len(rows),
            mask,
            self._rows_beyond(lengths, len(positions)) if beyond.device.type == "cpu" else beyond[:, None, :, None],
        )

    def _rows_beyond(self, lengths: Int32Array, padded: int) -> torch.Tensor:
        """See `_DecodeGroup.beyond`: a list costs what is beyond, where a mask would cost a pass over everything."""
        member, position = np.nonzero(np.arange(padded) >= lengths[:, None])
        heads = self._num_kv_heads
        beyond = ((member * heads)[:, None] + np.arange(heads)) * padded + position[:, None]
        return torch.from_numpy(beyond.reshape(-1))

    def _first_pages(self, kv_lens: Any) -> Any:
        """Index of the first page that a sequence's last token sees, by the sequence's length; an int or an array."""
        if self.group.sees_all:
            return kv_lens * 0
        return np.maximum(self._lowest(kv_lens), 0) // self.spec.page_size

    def _lowest(self, kv_lens: Any) -> Any:
        """Index of the first token that a sequence's last token sees, by the sequence's length, with a window or
        chunks; may be negative."""
        if self.group.chunk is not None:
            return (kv_lens - 1) // self.group.chunk * self.group.chunk
        return kv_lens - self.group.window

    def _chunks(self, pages: torch.Tensor) -> torch.Tensor:
        """Page ids [batch, num_pages] -> int64 [batch * num_kv_heads * num_pages], the rows of a cache seen as
        [num_pages * num_kv_heads, page_size * head_dim] in the order that makes keys contiguous by head."""
        # The page table is undefined beyond a sequence's end; any page will do, since its values are zeroed.
        return (pages.long().unsqueeze(1).clamp_(min=0) * self._num_kv_heads + self._kv_heads).flatten()

    def _gather(self, name: str, cache: torch.Tensor, chunks: torch.Tensor, batch: int) -> torch.Tensor:
        """One layer's K or V, without its scale -> [batch, num_kv_heads, padded length, head_dim], contiguous.

        On CPU the result is in scratch memory until the next call with the same name: page faults of newly allocated
        memory were measured to cost four times the copy itself.
        """
        chunk_size = self.spec.page_size * self._head_dim
        rows = as_bits(cache).view(-1, chunk_size)
        if cache.device.type == "cpu":
            gathered = self._scratch_rows(name, len(chunks), chunk_size)
            torch.index_select(rows, 0, chunks, out=as_bits(gathered))
        else:
            gathered = rows.index_select(0, chunks).view(cache.dtype)
        return gathered.to(self._dtype).view(batch, self._num_kv_heads, -1, self._head_dim)

    def _scratch_rows(self, name: str, count: int, size: int) -> torch.Tensor:
        scratch = self._scratch.get((name, size))
        if scratch is None or len(scratch) < count:
            with torch.inference_mode(False):
                scratch = self._scratch[name, size] = torch.empty((count, size), dtype=self.group.kv.dtype)
        return scratch[:count]

    def _tiles(self, begin: int, end: int, kv_len: int) -> tuple[_Tile, ...]:
        """Tiles of queries `begin` to `end` of the step: the last tokens of a sequence with kv_len gathered tokens."""
        cached, window = kv_len - (end - begin), self.group.window
        if cached == 0 and (window is None or kv_len <= window):
            return (_Tile(begin, end, 0, kv_len, None, True),)
        tiles = []
        for first in range(begin, end, _QUERY_TILE):
            last = min(first + _QUERY_TILE, end)
            kv_end = cached + last - begin
            kv_begin = 0 if window is None else max(0, cached + first - begin + 1 - window)
            tiles.append(_Tile(first, last, kv_begin, kv_end, self._mask(last - first, kv_end - kv_begin), False))
        return tuple(tiles)

    def _tiles_of_all(self, begin: int, end: int, kv_len: int) -> tuple[_Tile, ...]:
        """As `_tiles`, of queries that see all keys, or all from their window's begin on."""
        window, before = self.group.window, kv_len - (end - begin)
        tiles = []
        for first in range(begin, end, _QUERY_TILE):
            last = min(first + _QUERY_TILE, end)
            kv_begin = 0 if window is None else max(0, before + first - begin + 1 - window)
            mask = None
            if window is not None and before + last - begin > kv_begin + window:
                mask = torch.full((last - first, kv_len - kv_begin), -torch.inf, dtype=self._dtype)
                mask = mask.tril_(before + first - begin - kv_begin - window).to(self.spec.device)
            tiles.append(_Tile(first, last, kv_begin, kv_len, mask, False))
        return tuple(tiles)

    def _tiles_of_chunks(self, begin: int, end: int, kv_len: int, origin: int, chunk: int) -> tuple[_Tile, ...]:
        """As `_tiles`, with no tile across a chunk's end. origin: tokens before the gathered ones."""
        tiles, first = [], begin
        while first < end:
            position = origin + kv_len - (end - first)
            start = position // chunk * chunk
            last = min(end, first + _QUERY_TILE, first + start + chunk - position)
            kv_begin, kv_end, causal = start - origin, kv_len - (end - last), position == start
            mask = None if causal else self._mask(last - first, kv_end - kv_begin)
            tiles.append(_Tile(first, last, kv_begin, kv_end, mask, causal))
            first = last
        return tuple(tiles)

    def _mask(self, num_queries: int, num_keys: int) -> torch.Tensor | None:
        """Causal and aligned at the end: the last query sees the last key; the first key is seen by the first query."""
        if num_queries == 1:
            return None
        mask = torch.full((num_queries, num_keys), -torch.inf, dtype=self._dtype, device=self.spec.device)
        mask.triu_(num_keys - num_queries + 1)
        if self.group.window is not None:
            behind = torch.full_like(mask, -torch.inf).tril_(num_keys - num_queries - self.group.window)
            mask += behind
        return mask


def _attention(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, in float32, without the values' scale.

    q [batch, num_kv_heads, queries, head_dim], k and v [batch, num_kv_heads, keys, head_dim], mask added to the scores
    [..., queries, keys], sinks float32 [num_kv_heads, queries, 1] -> the shape of q.
    """
    scores = (q.float() @ k.float().transpose(2, 3)) * (layer.scale * layer.kv.scales.k)
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


def group_by_length(kv_lens: Int32Array, max_tokens: int) -> list[Int64Array]:
    """Indices into the batch, grouped: in a group no sequence is padded to more than twice its length, or by more than
    _PADDING_ALLOWED tokens, whichever allows more; and no group of several gathers more than `max_tokens`."""
    order = np.argsort(-kv_lens, kind="stable")
    groups, begin = [], 0
    for i in range(1, len(order) + 1):
        longest = int(kv_lens[order[begin]])
        if i < len(order):
            length = int(kv_lens[order[i]])
            similar = length * 2 >= longest or longest - length <= _PADDING_ALLOWED
            if similar and (i - begin + 1) * longest <= max_tokens:
                continue
        groups.append(np.sort(order[begin:i]))
        begin = i
    return groups
