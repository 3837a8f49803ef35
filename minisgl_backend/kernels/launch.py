"""What the host computes for a launch: sizes of grids and tiles, and programmatic dependent launch (PDL, Hopper and
later), whose rules are in plain/small_rows.py.

Called on the host, Triton's own `cdiv` and `next_power_of_2` take 3 to 5 us, as long as a small kernel; launching a
layer with FP8 weights would call them 36 times.
"""

from __future__ import annotations

MAX_PDL_TOKENS = 256  # of a decode step with a mixture of experts, whose kernels are launched with PDL


def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no smaller; 1 of 0."""
    return 1 << max(0, number - 1).bit_length()


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch arguments of a kernel with a parameter PDL: whether it may start before the previous kernel has ended."""
    # launch_pdl is passed only where it is asked for: Triton's interpreter does not know the option.
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
