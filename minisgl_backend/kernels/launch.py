"""Programmatic dependent launch (PDL, Hopper and later), as an option of a kernel's launch.

Its rules stand in linear/small_rows.py.
"""

from __future__ import annotations


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Arguments of a kernel with a parameter PDL: whether it starts before the one ahead of it has ended."""
    # launch_pdl is passed only where it is asked for: Triton's interpreter does not know the option.
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
