"""Which GPUs a rank asks for access: those of its own engine core, wherever they begin."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels import peer_sums as module
from minisgl_backend.kernels.peer_sums import PeerSums


@pytest.mark.parametrize(
    ("rank", "gpu", "pairs"), [(0, 0, [(0, 1)]), (1, 1, [(1, 0)]), (0, 2, [(2, 3)]), (1, 3, [(3, 2)])]
)
def test_a_rank_asks_for_the_gpus_of_its_engine_core(
    monkeypatch: pytest.MonkeyPatch, rank: int, gpu: int, pairs: list[tuple[int, int]]
) -> None:
    asked = []

    def access(device: torch.device, peer: int) -> bool:
        asked.append((device.index, peer))
        return False

    monkeypatch.setattr(module, "most_rows", lambda *_: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    with pytest.raises(OSError, match="no access"):
        PeerSums.open(
            rank,
            2,
            64,
            torch.float32,
            torch.device("cuda", gpu),
            lambda tensor: tensor.expand(2, -1),
            lambda value: value,
        )
    assert asked == pairs
