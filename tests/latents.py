"""Random latents in shuffled pages, and one layer that attends to them, for tests of backends for MLA."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.attention.layer import LatentHeads, LatentProjection
from minisgl_backend.kv.layout import FP8, ONE, KVScales
from tests.specs import latent_group, make_pool


class LatentCase:
    """Sequences of these lengths; rows are shuffled, and there are more of them than sequences."""

    def __init__(
        self,
        heads: LatentHeads,
        num_q_heads: int,
        kv_lens: list[int],
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_rows: int | None = None,
        scale: float | None = None,
    ) -> None:
        """scale: of latents in FP8; None: they are kept in `dtype`."""
        torch.manual_seed(page_size + num_q_heads)
        count, most = len(kv_lens), -(-max(kv_lens) // page_size)
        max_rows = max_rows or count + 2
        self.heads, self.kv_lens, self.device = heads, np.array(kv_lens, dtype=np.int32), torch.device(device)
        self.spec = latent_group(
            heads, num_q_heads=num_q_heads, page_size=page_size, max_seq_len=most * page_size, max_rows=max_rows,
            dtype=dtype, device=device, kv_dtype=None if scale is None else FP8,
        )  # fmt: skip
        self.group = self.spec.groups[0]
        pool = make_pool(self.spec, count * most, ONE if scale is None else KVScales(scale, scale))
        kept = pool.layer(0).k
        kept.copy_(torch.randn(kept.shape, device=device) / (scale or 1.0))
        pages = torch.zeros(max_rows, most, dtype=torch.int32)
        self.rows = torch.randperm(max_rows)[:count].int()
        pages[self.rows.long()] = (torch.randperm(count * most) + 1).int().view(count, most)
        self.page_table = pages.to(device)
        weight = torch.randn(num_q_heads, heads.nope_dim + heads.v_dim, heads.rank, dtype=dtype, device=device)
        weight *= heads.rank**-0.5
        flat = weight.view(-1, heads.rank)
        projection = LatentProjection(
            weight=weight, v_dim=heads.v_dim, expand_into=lambda latents, out: torch.mm(latents, flat.t(), out=out)
        )
        self.layer = self.spec.layer(0, pool.layer(0), latent=projection)

    def queries(self, num_tokens: int) -> torch.Tensor:
        """Rows of a larger tensor, as projections leave them."""
        shape = (num_tokens, self.group.num_q_heads * self.heads.qk_dim + 8)
        whole = torch.randn(shape, device=self.device).to(self.spec.dtype)
        return whole[:, :-8].unflatten(1, (self.group.num_q_heads, -1))

    def decode_inputs(self) -> DecodeInputs:
        return DecodeInputs(
            kv_lens=torch.from_numpy(self.kv_lens).to(self.device),
            rows=self.rows.to(self.device),
            page_table=self.page_table,
            kv_lens_host=self.kv_lens,
            rows_host=self.rows.numpy(),
        )

    def prefill_inputs(self, q_lens: list[int]) -> PrefillInputs:
        """The last `q_lens` tokens of the sequences are queries."""
        ends = np.cumsum([0, *q_lens]).astype(np.int32)
        return PrefillInputs(
            cu_seqlens_q=torch.from_numpy(ends).to(self.device),
            kv_lens=torch.from_numpy(self.kv_lens).to(self.device),
            rows=self.rows.to(self.device),
            page_table=self.page_table,
            cu_seqlens_q_host=ends,
            kv_lens_host=self.kv_lens,
            rows_host=self.rows.numpy(),
        )
