"""Whether FlashAttention works on this machine: a trial call.

sgl-kernel and sglang-kernel install the same files: if one is installed over the other, or over another version, all
imports work but the first call fails, since the library's arguments are not those of its Python wrapper.
"""

from __future__ import annotations

import torch

_PAGE, _HEAD = 64, 64  # tokens; elements


def answers() -> bool:
    """Returns true; otherwise raises RuntimeError saying why not, or whatever importing sgl-kernel raises."""
    from sgl_kernel.flash_attn import is_fa3_supported

    if not is_fa3_supported():
        raise RuntimeError("is_fa3_supported() says no")
    device = open_gpu()
    if device is not None:
        try:
            _call(device)
        except Exception as error:
            raise RuntimeError(
                f"its first call fails, as where files of two versions are mixed: {type(error).__name__}: {error}; pip "
                "uninstall sgl-kernel sglang-kernel before one of them is installed"
            ) from error
    return True


def open_gpu() -> torch.device | None:
    """The GPU that this process has already opened, so that no memory is taken on another; None: there is none."""
    if not torch.cuda.is_available():
        return None
    is_open = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)
    opened = (index for index in range(torch.cuda.device_count()) if is_open(index))
    return torch.device("cuda", next(opened, torch.cuda.current_device()))


def _call(device: torch.device) -> None:
    """Attention of one token of one sequence, called like `FlashAttentionBackend` does."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    ints = torch.tensor([0, 1], dtype=torch.int32, device=device)
    pages = torch.zeros((1, _PAGE, 1, _HEAD), dtype=torch.bfloat16, device=device)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        attended = flash_attn_with_kvcache(
            pages[0, :1],
            pages,
            pages,
            cache_seqlens=ints[1:],
            page_table=ints[:1, None],
            cu_seqlens_q=ints,
            max_seqlen_q=1,
            softmax_scale=1.0,
            causal=True,
            window_size=(-1, -1),
            num_splits=0,
        )
    attended.cpu()  # waits: a kernel that fails does so here
