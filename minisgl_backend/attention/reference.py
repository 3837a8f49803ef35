"""The `torch` backend: torch's scaled dot product attention over gathered pages, on CPU and GPU.

It gathers the pages of a batch into contiguous keys and values once a layer. Sequences of very different length are
computed in separate groups, so that a long one does not pad all others. It does not run under CUDA graphs.

What is gathered beyond the end of a sequence is set to zero before it is used. A mask is not enough: the weight of a
masked position is 0, and 0 times what another sequence left there, if that is not a number, is not a number either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.errors import ConfigError

_QUERY_TILE = 512  # queries that share one mask; bounds the mask to this times the context
_PADDING_ALLOWED = 256  # tokens by which a sequence may be padded even if that more than doubles it
# Padded tokens that are gathered at once: bounds the temporary keys and values, which on CPU should not be evicted
# from the cache before they are read. Measured: 32 sequences of 2,000 tokens take half the time in eight groups.
_GROUP_TOKENS_CPU = 1 << 13
_GROUP_TOKENS_GPU = 1 << 18


@dataclass(frozen=True)
class _Tile:
    """Consecutive queries of one sequence."""

    begin: int  # of the step's prefill tokens
    end: int
    kv_len: int  # keys that the last query sees
    mask: torch.Tensor | None  # [end - begin, kv_len], added to the scores
    causal: bool  # queries and keys begin at the same token and need no mask


@dataclass(frozen=True)
class _SequencePrefill:
    chunks: torch.Tensor  # int64 [num_kv_heads * num_pages]; see TorchBackend._chunks
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences of similar length, padded to the longest."""

    members: torch.Tensor | None  # int64 [group]; positions in the batch; None: the whole batch in order
    chunks: torch.Tensor  # int64 [group * num_kv_heads * num_pages]
    size: int
    mask: torch.Tensor  # [group, 1, 1, padded length], added to the scores
    # Where gathered keys and values belong to nobody. On CPU int64 [num_lines], lines of them seen as
    # [group * num_kv_heads * padded length, head_dim]; on GPU bool [group, 1, padded length, 1].
    beyond: torch.Tensor


class TorchBackend(AttentionBackend):
    """Serves every head size, page size and number format. Neither plans nor attention synchronise."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.sliding_window is not None:
            raise ConfigError("the attention backend torch does not serve sliding windows")
        if spec.num_q_heads % spec.num_kv_heads:
            raise ConfigError(
                f"{spec.num_q_heads} query heads cannot share {spec.num_kv_heads} KV heads; "
                "allowed: a multiple of the KV heads"
            )
        self._kv_heads = torch.arange(spec.num_kv_heads, device=spec.device).view(1, -1, 1)
        self._group_tokens = _GROUP_TOKENS_CPU if spec.device.type == "cpu" else _GROUP_TOKENS_GPU
        self._scratch: dict[str, torch.Tensor] = {}  # CPU only: gathered K and V, kept from call to call

    def plan_prefill(self, inputs: PrefillInputs) -> tuple[_SequencePrefill, ...]:
        sequences = []
        for i, (kv_len, row) in enumerate(zip(inputs.kv_lens_host.tolist(), inputs.rows_host.tolist(), strict=True)):
            begin, end = int(inputs.cu_seqlens_q_host[i]), int(inputs.cu_seqlens_q_host[i + 1])
            num_pages = -(-kv_len // self.spec.page_size)
            chunks = self._chunks(inputs.page_table[row : row + 1, :num_pages])
            sequences.append(_SequencePrefill(chunks, self._tiles(begin, end, kv_len)))
        return tuple(sequences)

    def prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: tuple[_SequencePrefill, ...]
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for sequence in plan:
            k, v = self._gather("k", k_cache, sequence.chunks, 1), self._gather("v", v_cache, sequence.chunks, 1)
            for tile in sequence.tiles:
                attended = F.scaled_dot_product_attention(
                    q[tile.begin : tile.end].transpose(0, 1).unsqueeze(0),
                    k[:, :, : tile.kv_len],
                    v[:, :, : tile.kv_len],
                    attn_mask=tile.mask,
                    is_causal=tile.causal,
                    scale=self.spec.softmax_scale,
                    enable_gqa=self.spec.num_q_heads != self.spec.num_kv_heads,
                )
                out[tile.begin : tile.end] = attended[0].transpose(0, 1)
        return out

    def plan_decode(self, inputs: DecodeInputs) -> tuple[_DecodeGroup, ...]:
        groups = _group_by_length(inputs.kv_lens_host, self._group_tokens)
        if len(groups) == 1:
            return (self._decode_group(inputs, None),)
        return tuple(self._decode_group(inputs, group) for group in groups)

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: tuple[_DecodeGroup, ...]
    ) -> torch.Tensor:
        if plan[0].members is None:
            return self._decode(q, k_cache, v_cache, plan[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan:
            out[group.members] = self._decode(q[group.members], k_cache, v_cache, group)
        return out

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: _DecodeGroup
    ) -> torch.Tensor:
        # Query heads that share a KV head stand in for the query positions: keys are never repeated.
        attended = F.scaled_dot_product_attention(
            q.reshape(group.size, self.spec.num_kv_heads, -1, self.spec.head_dim),
            self._cleared(self._gather("k", k_cache, group.chunks, group.size), group.beyond),
            self._cleared(self._gather("v", v_cache, group.chunks, group.size), group.beyond),
            attn_mask=group.mask,
            scale=self.spec.softmax_scale,
        )
        return attended.reshape(q.shape)

    def _cleared(self, gathered: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        if beyond.dtype == torch.bool:
            return gathered.masked_fill_(beyond, 0)
        gathered.view(-1, self.spec.head_dim).index_fill_(0, beyond, 0)
        return gathered

    def _decode_group(self, inputs: DecodeInputs, group: npt.NDArray[np.int64] | None) -> _DecodeGroup:
        members = None if group is None else torch.from_numpy(group).to(self.spec.device)
        rows = inputs.rows if members is None else inputs.rows[members]
        kv_lens = inputs.kv_lens if members is None else inputs.kv_lens[members]
        lengths = inputs.kv_lens_host if group is None else inputs.kv_lens_host[group]
        num_pages = -(-int(lengths.max()) // self.spec.page_size)
        positions = torch.arange(num_pages * self.spec.page_size, device=self.spec.device)
        hidden = positions.unsqueeze(0) >= kv_lens.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.spec.dtype, device=self.spec.device)
        mask = mask.masked_fill_(hidden, -torch.inf).view(len(rows), 1, 1, -1)
        chunks = self._chunks(inputs.page_table[rows, :num_pages])
        beyond = (
            self._lines_beyond(lengths, len(positions)) if hidden.device.type == "cpu" else hidden[:, None, :, None]
        )
        return _DecodeGroup(members, chunks, len(rows), mask, beyond)

    def _lines_beyond(self, lengths: npt.NDArray[np.int32], padded: int) -> torch.Tensor:
        """See `_DecodeGroup.beyond`: a list costs what is beyond, where a mask would cost a pass over everything."""
        member, position = np.nonzero(np.arange(padded) >= lengths[:, None])
        heads = self.spec.num_kv_heads
        lines = ((member * heads)[:, None] + np.arange(heads)) * padded + position[:, None]
        return torch.from_numpy(lines.reshape(-1))

    def _chunks(self, pages: torch.Tensor) -> torch.Tensor:
        """Page ids [batch, num_pages] -> int64 [batch * num_kv_heads * num_pages], the lines of a cache seen as
        [num_pages * num_kv_heads, page_size * head_dim] in the order that makes keys contiguous by head."""
        # What stands in the page table beyond a sequence's end is unspecified; any page will do, since it is cleared.
        return (pages.long().unsqueeze(1).clamp_(min=0) * self.spec.num_kv_heads + self._kv_heads).flatten()

    def _gather(self, name: str, cache: torch.Tensor, chunks: torch.Tensor, batch: int) -> torch.Tensor:
        """One layer's K or V -> [batch, num_kv_heads, padded length, head_dim], contiguous.

        On CPU the result lives in scratch memory until the next call with the same name: fresh memory of this size
        would come from the system page by page, which was measured to cost four times the copy itself.
        """
        chunk_size = self.spec.page_size * self.spec.head_dim
        lines = cache.view(-1, chunk_size)
        if cache.device.type == "cpu":
            gathered = self._scratch_lines(name, len(chunks), chunk_size)
            torch.index_select(lines, 0, chunks, out=gathered)
        else:
            gathered = lines.index_select(0, chunks)
        return gathered.view(batch, self.spec.num_kv_heads, -1, self.spec.head_dim)

    def _scratch_lines(self, name: str, count: int, size: int) -> torch.Tensor:
        scratch = self._scratch.get(name)
        if scratch is None or len(scratch) < count:
            with torch.inference_mode(False):
                scratch = self._scratch[name] = torch.empty((count, size), dtype=self.spec.dtype)
        return scratch[:count]

    def _tiles(self, begin: int, end: int, kv_len: int) -> tuple[_Tile, ...]:
        cached = kv_len - (end - begin)
        if cached == 0:
            return (_Tile(begin, end, kv_len, None, True),)
        tiles = []
        for first in range(begin, end, _QUERY_TILE):
            last = min(first + _QUERY_TILE, end)
            visible = cached + last - begin
            tiles.append(_Tile(first, last, visible, self._causal_mask(last - first, visible), False))
        return tuple(tiles)

    def _causal_mask(self, num_queries: int, kv_len: int) -> torch.Tensor | None:
        """Causal and aligned at the end: the last query sees all `kv_len` keys."""
        if num_queries == 1:
            return None
        mask = torch.full((num_queries, kv_len), -torch.inf, dtype=self.spec.dtype, device=self.spec.device)
        return mask.triu_(kv_len - num_queries + 1)


def _group_by_length(kv_lens: npt.NDArray[np.int32], max_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Positions in the batch, grouped: in a group nobody is padded to more than twice its length, or by more than
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
