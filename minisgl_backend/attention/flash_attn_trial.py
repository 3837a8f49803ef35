"""Whether FlashAttention is of use on this machine, by one call of it.

sgl-kernel and sglang-kernel install the same files: where one lies over the other, or over another version of itself,
everything can be imported, and the first call fails, since the library takes other arguments than its Python hands it.
"""

from __future__ import annotations

import torch

_PAGE, _HEAD = 64, 64  # tokens; elements


def answers() -> bool:
    """True; else raises RuntimeError saying why not, and whatever sgl-kernel raises when it is imported."""
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
    """The GPU that this process has opened, so that no other one loses memory to it; None: there is none."""
    if not torch.cuda.is_available():
        return None
    is_open = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)
    opened = (index for index in range(torch.cuda.device_count()) if is_open(index))
    return torch.device("cuda", next(opened, torch.cuda.current_device()))


def _call(device: torch.device) -> None:
    """As `FlashAttentionBackend` does it: one token of one sequence."""
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
