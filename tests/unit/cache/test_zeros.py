"""Zeros that a CPU has where they are written alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kv.zeros import zeros

CPU = torch.device("cpu")


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_they_take_memory_where_they_are_written() -> None:
    before = resident()
    found = zeros((1024, 131072), torch.int16, CPU)
    found[7] = 3
    assert resident() - before < 16 << 20
    assert found.shape == (1024, 131072)
    assert found.dtype == torch.int16
    assert found[6:9].sum(1).tolist() == [0, 3 * 131072, 0]


def test_none_and_too_many() -> None:
    assert zeros((0, 5), torch.int32, CPU).shape == (0, 5)
    with pytest.raises(MemoryError, match="allocate memory"):
        zeros((1 << 40, 1 << 20), torch.int32, CPU)
