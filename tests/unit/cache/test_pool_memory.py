"""Whose memory a pool's is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minisgl_backend.kv.layout import MHALayout
from minisgl_backend.kv.pool import KVPool, LayerPlace


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cpus_pool_is_not_shared_memory() -> None:
    layout = MHALayout(num_kv_heads=1, head_dim=64, dtype=torch.float32)
    pool = KVPool([LayerPlace(layout, 0)], 16, 64, torch.device("cpu"))
    address = pool._tensors[0][0].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, permissions, *_ = line.split()
        begin, end = (int(place, 16) for place in places.split("-"))
        if begin <= address < end:
            assert permissions == "rw-p"
            return
    raise AssertionError("it is nowhere")
