"""vLLM's operators of Machete in torch: what they ask of their arguments, and what they compute. The order of their
layout only the library knows; here it is another one than the weight's."""

from __future__ import annotations

import torch

_UINT4, _UINT4B8 = 1125899906843648, 1125899907892224  # scalar_types.uint4.id, uint4b8.id
_SCHEDULE = "{}_2x1x1_TmaMI__TmaCoop_streamK"
SCHEDULES = [_SCHEDULE.format(tile) for tile in ("128x32 256x32 128x64 256x64 128x128 256x128 128x256".split())]


class MacheteReference:
    """Has the operators as attributes, as torch.ops._C has them."""

    def machete_prepack_B(
        self, words: torch.Tensor, a_type: torch.dtype, b_type: int, scales_type: torch.dtype
    ) -> torch.Tensor:
        assert words.dtype == torch.int32
        assert words.t().is_contiguous()  # by columns
        assert words.shape[0] % 8 == 0
        assert words.shape[1] % 128 == 0
        assert a_type in (torch.float16, torch.bfloat16)
        assert scales_type == a_type
        assert b_type in (_UINT4, _UINT4B8)
        return words.flip(1).t().contiguous().t()

    def machete_mm(
        self, a: torch.Tensor, words: torch.Tensor, b_type: int, out_type: None, scales: torch.Tensor,
        zeros: torch.Tensor | None, group: int, channel_scales: None, token_scales: None, schedule: str,
    ) -> torch.Tensor:  # fmt: skip
        assert out_type is channel_scales is token_scales is None
        assert schedule in SCHEDULES
        size_in, size_out = a.shape[1], words.shape[1]
        assert a.is_contiguous()
        assert words.t().is_contiguous()
        assert 8 * words.shape[0] == size_in
        assert (group % 64, size_in % group) == (0, 0)
        assert b_type == (_UINT4B8 if zeros is None else _UINT4)
        for one in (scales,) if zeros is None else (scales, zeros):
            assert one.is_contiguous()
            assert (one.shape, one.dtype) == ((size_in // group, size_out), a.dtype)
        numbers = torch.stack([words.flip(1) >> 4 * i & 15 for i in range(8)], 1).reshape(size_in, size_out).float()
        of_inputs = scales.float().repeat_interleave(group, 0)
        if zeros is None:
            weight = (numbers - 8) * of_inputs
        else:
            weight = numbers * of_inputs + zeros.float().repeat_interleave(group, 0)
        return (a.float() @ weight).to(a.dtype)
