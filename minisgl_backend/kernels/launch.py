"""Programmatic dependent launch (PDL, Hopper and later), as an option of a kernel's launch.

Its rules are in linear/small_rows.py.
"""

from __future__ import annotations


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch arguments of a kernel with a parameter PDL: whether it may start before the previous kernel has ended."""
    # launch_pdl is passed only where it is asked for: Triton's interpreter does not know the option.
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
