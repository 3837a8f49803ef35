"""Which GPUs a rank asks for access, those of its own engine core, wherever they begin; and what follows where it gets
none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minisgl_backend.kernels.collectives import peer_sums as module
from minisgl_backend.kernels.collectives.peer_memory import HANDLE_BYTES, Peers
from minisgl_backend.kernels.collectives.peer_sums import PeerSums
from minisgl_backend.kernels.device_facts import DeviceFacts


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
    peers = Peers(rank, 2, torch.device("cuda", gpu), lambda tensor: tensor.expand(2, -1), lambda value: value)
    with pytest.raises(OSError, match="no access"):
        PeerSums.open(peers, 64, torch.float32)
    assert asked == pairs


class SharedMemory:
    """One rank's PeerMemory, which writes down what is done to it."""

    address = 0

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def handle(self) -> bytes:
        return bytes(HANDLE_BYTES)

    def open(self, handles: list[bytes]) -> list[int]:
        return [0] * len(handles)

    def leave(self) -> None:
        self._done.append("leave")

    def close(self) -> None:
        self._done.append("free")


@pytest.mark.parametrize("wrong", ["open", "trial", "driver"])
def test_no_rank_frees_what_another_one_still_has_open(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    size, done, together = 3, list[str](), threading.Barrier(3)
    values: list[int] = []

    def minimum(value: int) -> int:
        values.append(value)
        together.wait(20)
        smallest = min(values[-size:])
        together.wait(20)
        return smallest

    def refuse(handles: list[bytes]) -> list[int]:
        raise OSError("cuIpcOpenMemHandle says no")

    def rank(number: int) -> None:
        memory = SharedMemory(done)
        if number == 1 and wrong == "open":
            memory.open = refuse  # type: ignore[method-assign]
        memories[threading.get_ident()] = memory
        with pytest.raises(OSError, match=r"says no|another number|could not share"):
            PeerSums.open(Peers(number, size, torch.device("cpu"), gather, minimum), 64, torch.float32)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(size, -1)

    def trial(sums: PeerSums, *_: object) -> str:
        if wrong == "driver" and sums._inboxes.rank == 1:
            raise OSError("cuStreamWriteValue32 says no")
        return "another number came" if wrong == "trial" else ""

    memories: dict[int, SharedMemory] = {}  # by thread
    monkeypatch.setattr(module, "most_rows", lambda *_: 8)
    monkeypatch.setattr(module, "PeerMemory", lambda *_: memories[threading.get_ident()])
    monkeypatch.setattr(PeerSums, "_trial", trial)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(DeviceFacts, "of", lambda _: DeviceFacts.named("h200"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(rank, range(size)))
    assert done == ["leave"] * size + ["free"] * size
