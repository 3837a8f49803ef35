"""GEMMs with FP8 weights on GPUs that multiply FP8 (compute capability 8.9 and later).

Few rows are bound by the bytes of the weights: a kernel of the Triton language after the design of small_rows.py, which
norms and quantizes the activations itself, and has residual and activation as its epilogue. What the norm divides by
cancels out in the quantized numbers, since their scale is divided by it, too: one pass over x finds its largest number
and its root mean square. Both operands become float16, which holds every FP8 number, and whose products are exact in
float32. More rows are quantized by a kernel of their own, which norms them; many are multiplied by torch's
`_scaled_mm`.

`pdl`: programmatic dependent launch, whose rules stand in small_rows.py. None of this was measured yet: the borders
between the ways and the cuts are those of 16-bit weights with half the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels import elementwise
from minisgl_backend.kernels.activation import activate
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.fp8_torch import FP8, LARGEST, LEAST, Fp8Kernels
from minisgl_backend.kernels.linear.small_rows import LinearWorkspace
from minisgl_backend.kernels.triton_ops import TritonPlainKernels

MAX_ROWS_INSIDE = 8  # that the kernel quantizes itself: every program reads all of them
MAX_ROWS = 64  # of the kernel; more are torch's
ROWWISE = (9, 0)  # capability from which torch multiplies with a scale for each row
_ALIGNMENT = 16  # numbers that sizes of `_scaled_mm` are multiples of
_TILE_OUT, _TILE_IN, _MAX_SPLIT = 64, 128, 8


class TritonFp8Kernels(Fp8Kernels):
    """The contracts are those of `Fp8Kernels`. Nothing synchronises with the device."""

    def __init__(self, plain: TritonPlainKernels, device: torch.device) -> None:
        """plain: of the same device, whose workspace is used: the kernels follow one another."""
        super().__init__(plain.ops)
        self._plain = plain
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        self._is_rowwise = (properties.major, properties.minor) >= ROWWISE

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, (size_out, size_in) = len(x), weight.shape
        pdl = self._plain.ops.pdl(x)
        if 0 < rows <= MAX_ROWS:
            return linear(
                x, weight, scale, self._plain.workspace, norm_weight=norm_weight, eps=eps, bias=bias,
                residual=residual, activation=activation, num_sms=self._num_sms, pdl=pdl,
            )  # fmt: skip
        if rows == 0 or size_out % _ALIGNMENT or size_in % _ALIGNMENT:
            return super().linear(
                x, weight, scale, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, activation=activation
            )
        numbers, x_scale = quantize_tokens(x, norm_weight, eps)
        out = self._scaled_mm(numbers, x_scale, weight, scale, x.dtype)
        if bias is not None:
            out += bias
        if activation is not None:
            return elementwise.activate_mul(out, activation, pdl)
        return out if residual is None else residual.add_(out)

    def _scaled_mm(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if self._is_rowwise and dtype == torch.bfloat16:
            return torch._scaled_mm(
                x, weight.t(), scale_a=x_scale.unsqueeze(1), scale_b=scale.unsqueeze(0), out_dtype=dtype
            )
        one = torch.ones((), dtype=torch.float32, device=x.device)
        out = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (out.mul_(x_scale.unsqueeze(1)).mul_(scale)).to(dtype)

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        from minisgl_backend.kernels.moe.fp8 import moe  # which needs what is above

        return moe(
            x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale, residual, activation,
            pdl=self._plain.moe_pdl(x),
        )  # fmt: skip


def quantize_tokens(
    x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) [num_tokens, size] as FP8, and its float32 scales [num_tokens]. norm_weight [size]: RMSNorm first."""
    num_tokens, size = x.shape
    numbers = torch.empty((num_tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    _quantize_kernel[(num_tokens,)](
        x, norm_weight if norm_weight is not None else x, numbers, scales, eps, x.stride(0), SIZE=size, PADDED=padded,
        NORM=norm_weight is not None, LARGEST=LARGEST, LEAST=LEAST, num_warps=min(16, max(1, padded // 512)),
        **pdl_options(pdl),
    )  # fmt: skip
    return numbers, scales


@triton.jit
def _quantize_kernel(
    x_ptr, norm_ptr, out_ptr, scale_ptr, eps, x_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    ok = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + i, mask=ok, other=0.0).to(tl.float32)
        x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps) * norm
    scale = tl.maximum(tl.max(tl.abs(x), 0), LEAST) / LARGEST
    tl.store(out_ptr + row * SIZE + i, _to_fp8(x / scale, LARGEST), mask=ok)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _to_fp8(x, LARGEST: tl.constexpr):
    """A quotient by a rounded scale may be a little more than the format's largest number."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float8e4nv)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    num_sms: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Fp8Kernels.linear`'s, for up to MAX_ROWS rows."""
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = len(weight) // 2 if gated else len(weight)
    x_scale = scale
    is_inside = rows <= MAX_ROWS_INSIDE
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    if not is_inside:
        x, x_scale = quantize_tokens(x, norm_weight, eps, pdl)
        norm_weight = None
    padded = max(16, triton.next_power_of_2(rows))
    programs, split = triton.cdiv(size_out, _TILE_OUT), 1
    room = min(_MAX_SPLIT, workspace.max_split, workspace.partial.numel() // (size_out * padded))
    while not gated and programs * split < num_sms and split * 2 <= room and size_in // (split * 2) >= 2 * _TILE_IN:
        split *= 2
    part = triton.cdiv(triton.cdiv(size_in, split), _TILE_IN) * _TILE_IN
    split = triton.cdiv(size_in, part)
    _linear_kernel[(programs, split)](
        x, x_scale, weight, scale, x if norm_weight is None else norm_weight, x if bias is None else bias,
        x if residual is None else residual, out, workspace.partial, workspace.counters, rows, eps, x.stride(0),
        SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split, ROWS=padded, TILE_OUT=_TILE_OUT, TILE_IN=_TILE_IN,
        INSIDE=is_inside, NORM=norm_weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATED=gated, ACTIVATION=activation, LARGEST=LARGEST, LEAST=LEAST, num_warps=4, num_stages=4,
        **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    rows, eps, x_stride,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, INSIDE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """INSIDE: x are the model's numbers, yet to be normed and quantized. Else: FP8, with their scales."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    k = tl.arange(0, TILE_IN)
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    x_rows = x_ptr + r[:, None] * x_stride
    w_scale = tl.load(scale_ptr + o, mask=o_ok, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    if INSIDE:
        largest = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, SIZE_IN, TILE_IN):
            i = start + k
            x32 = tl.load(x_rows + i[None, :], mask=r_ok[:, None] & (i < SIZE_IN)[None, :], other=0.0).to(tl.float32)
            if NORM:
                squares += tl.sum(x32 * x32, 1)
                x32 = x32 * tl.load(norm_ptr + i, mask=i < SIZE_IN, other=0.0).to(tl.float32)[None, :]
            largest = tl.maximum(largest, tl.max(tl.abs(x32), 1))
        step = tl.maximum(largest, LEAST) / LARGEST
        x_scale = step
        if NORM:
            x_scale = step / tl.sqrt(squares / SIZE_IN + eps)
    else:
        x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    begin = split * PART
    end = tl.minimum(begin + PART, SIZE_IN)
    for start in tl.range(begin, end, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0).to(tl.float16)
        x = tl.load(x_rows + i[None, :], mask=r_ok[:, None] & i_ok[None, :], other=0.0)
        if INSIDE:
            x32 = x.to(tl.float32)
            if NORM:
                x32 = x32 * tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)[None, :]
            x = _to_fp8(x32 / step[:, None], LARGEST)
        x = tl.trans(x.to(tl.float16))
        acc = tl.dot(w, x, acc)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0).to(tl.float16)
            acc_up = tl.dot(w_up, x, acc_up)

    if SPLIT > 1:
        # The last program to arrive adds the parts in order.
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
        tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
        for s in tl.static_range(SPLIT):
            part_slab = (s * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")

    acc = acc * w_scale[:, None] * x_scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up_scale = tl.load(scale_ptr + SIZE_OUT + o, mask=o_ok, other=0.0)
        acc_up = acc_up * up_scale[:, None] * x_scale[None, :]
        if BIAS:
            acc_up += tl.load(bias_ptr + SIZE_OUT + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, ACTIVATION) * acc_up
    address = r[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & o_ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
