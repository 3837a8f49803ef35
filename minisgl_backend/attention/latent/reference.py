"""The `torch` backend of latents (MLA): torch GEMMs in float32, on CPU and GPU. No CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.arrays import Int64Array
from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.latent.base import LatentBackend, Piece, numbers_of
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.reference import group_by_length
from minisgl_backend.kernels.attention.calls import Expanded
from minisgl_backend.kernels.torch_ops import as_bits

_QUERY_TILE = 256  # queries whose scores are computed at once
_GROUP_TOKENS = 1 << 14  # padded tokens whose latents are gathered at once


@dataclass(frozen=True)
class _Group:
    """Sequences of similar length, padded to the longest."""

    members: torch.Tensor  # int64 [size]; positions in the batch
    slots: torch.Tensor  # int64 [size * padded length]; any beyond a sequence's end
    beyond: torch.Tensor  # bool [size, padded length]


class TorchLatentBackend(LatentBackend):
    """Serves every size, page size and dtype. Neither plans nor attention synchronise."""

    def attend_expanded(self, layer: AttentionLayer, piece: Piece, of: Expanded) -> None:
        q, out, lse, nope_dim = of.q, of.out, of.lse, self.heads.nope_dim
        for q_begin, q_end, kv_begin, kv_end, offset, continues in piece.segments_host.tolist():
            k, v = of.keys_values[kv_begin:kv_end].float().split([nope_dim, self.heads.v_dim], dim=-1)
            key = of.rotated[kv_begin:kv_end].float()
            for begin in range(q_begin, q_end, _QUERY_TILE):
                end = min(begin + _QUERY_TILE, q_end)
                queries = q[begin:end].float()
                scores = torch.einsum("qhd,khd->hqk", queries[..., :nope_dim], k)
                scores += torch.einsum("qhd,kd->hqk", queries[..., nope_dim:], key)
                last = offset + torch.arange(begin - q_begin, end - q_begin, device=q.device)
                hidden = torch.arange(kv_end - kv_begin, device=q.device) > last.unsqueeze(1)
                scores = (scores * layer.scale).masked_fill_(hidden, -torch.inf)
                found = scores.logsumexp(-1)  # [num_q_heads, queries]
                weights = torch.exp(scores - found.clamp(min=-1e30).unsqueeze(-1))
                attended = torch.einsum("hqk,khd->qhd", weights, v)
                if continues:
                    before = lse[begin:end].t() * np.log(2.0)
                    together = torch.logaddexp(before, found)
                    attended *= torch.exp(found - together).t().unsqueeze(-1)
                    attended += out[begin:end].float() * torch.exp(before - together).t().unsqueeze(-1)
                    found = together
                lse[begin:end] = found.t() / np.log(2.0)
                out[begin:end] = attended

    def plan_decode(self, inputs: DecodeInputs) -> tuple[_Group, ...]:
        return tuple(self._group(inputs, members) for members in group_by_length(inputs.kv_lens_host, _GROUP_TOKENS))

    def attend_latents(
        self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: tuple[_Group, ...]
    ) -> torch.Tensor:
        kept, rank, q = as_bits(layer.kv.k).flatten(0, 2), self.heads.rank, torch.cat((q, q_rope), -1)
        out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
        for group in plan:
            latents = numbers_of(kept.index_select(0, group.slots), layer.kv, torch.float32).float()
            latents = latents.view(*group.beyond.shape, -1)
            latents.masked_fill_(group.beyond.unsqueeze(-1), 0)  # 0 times the NaN of another sequence would be NaN
            scores = q[group.members].float() @ latents.transpose(1, 2) * layer.scale
            weights = scores.masked_fill_(group.beyond.unsqueeze(1), -torch.inf).softmax(-1)
            out[group.members] = (weights @ latents[..., :rank]).to(q.dtype)
        return out

    def _group(self, inputs: DecodeInputs, members: Int64Array) -> _Group:
        device, page_size = self.spec.device, self.spec.page_size
        longest = int(inputs.kv_lens_host[members].max())
        there = torch.from_numpy(members).to(device)
        positions = torch.arange(longest, device=device)
        pages = inputs.page_table[inputs.rows[there].unsqueeze(1), positions // page_size].long().clamp_(min=0)
        slots = pages * page_size + positions % page_size
        return _Group(there, slots.flatten(), positions >= inputs.kv_lens[there].unsqueeze(1))
