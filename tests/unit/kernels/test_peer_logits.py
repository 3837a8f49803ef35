"""Logits to rank 0 and tokens back, in Triton's interpreter: in one process, where whoever waits comes last, and in
several."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as multiprocessing

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_collectives.py runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.collectives import logits_to_rank_0 as peer_logits
from minisgl_backend.kernels.collectives.logits_to_rank_0 import EMPTY, Mailboxes, PeerLogits
from minisgl_backend.kernels.collectives.peer_memory import Peers, tensor_at

CPU = torch.device("cpu")


class Memory:
    """What the ranks share; may be that of several processes."""

    def __init__(self, size: int, max_rows: int, width: int) -> None:
        self.size, self.max_rows = size, max_rows
        self.logits = torch.full((max_rows, width), float("nan")).share_memory_()
        self.flags = torch.zeros(size, dtype=torch.int32).share_memory_()
        self.receipts = torch.zeros(size, dtype=torch.int32).share_memory_()
        self.inboxes = [torch.full((2 * max_rows,), EMPTY, dtype=torch.int32).share_memory_() for _ in range(size)]
        self.stop = torch.zeros(1, dtype=torch.int32).share_memory_()

    def rank(self, rank: int, vocab_size: int) -> PeerLogits:
        boxes = Mailboxes(
            rank=rank,
            size=self.size,
            max_rows=self.max_rows,
            flags=self.flags.data_ptr(),
            receipts=self.receipts.data_ptr(),
            inboxes=torch.tensor([inbox.data_ptr() for inbox in self.inboxes]),
            turns=torch.zeros(2, dtype=torch.int32),
            stop=self.stop.data_ptr(),
        )
        return PeerLogits(self.logits, vocab_size, boxes, None, self.stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_logits_are_whole_on_rank_0_step_after_step(size: int) -> None:
    torch.manual_seed(size)
    vocab_size, each = 4 * size - 1, 4
    memory = Memory(size, 6, 4 * size + 3)
    ranks = [memory.rank(rank, vocab_size) for rank in range(size)]
    for step, rows in enumerate((1, 6, 3, 3, 1)):
        logits = torch.randn(rows, vocab_size)
        for rank, one in reversed([*enumerate(ranks)]):
            part = logits[:, rank * each : (rank + 1) * each]
            columns = one.columns(rows, rank * each, part.shape[1])
            assert columns.stride() == (4 * size + 3, 1)
            columns.copy_(part)
            collected = one.collect(rows)
            assert torch.equal(collected, logits) if rank == 0 else collected.shape == (rows, 0)
        assert memory.flags[1:].tolist() == [(step + 1) % 2] * (size - 1)
    assert ranks[0].fits(6)
    assert not ranks[0].fits(7)


@pytest.mark.parametrize("size", [2, 3])
def test_tokens_arrive_call_after_call(size: int) -> None:
    memory = Memory(size, 5, 8)
    ranks = [memory.rank(rank, 8) for rank in range(size)]
    for call, rows in enumerate((1, 5, 2, 5, 3)):
        sent = torch.randint(0, 200_000, (2, rows), dtype=torch.int32)
        sent[1, 0] = EMPTY if call == 2 else 0
        ranks[0].share_tokens(sent.clone())
        for one in ranks[1:]:
            received = torch.full_like(sent, 7)
            one.share_tokens(received)
            assert torch.equal(received, torch.where(sent == EMPTY, 0, sent)), "it would be waited for for ever"
        assert all(bool((inbox == EMPTY).all()) for inbox in memory.inboxes)
        assert memory.receipts[1:].tolist() == [(call + 1) % 2] * (size - 1)


def test_who_waits_in_vain_ends_when_it_is_told_to() -> None:
    memory = Memory(2, 1, 8)
    first, second = (memory.rank(rank, 8) for rank in range(2))
    first.stop()
    assert first.collect(1).shape == (1, 8)
    tokens = torch.ones(2, 1, dtype=torch.int32)
    second.share_tokens(tokens)
    assert tokens.tolist() == [[0], [0]], "no row of an embedding is that far away"
    for _ in range(3):  # without a receipt
        first.share_tokens(torch.ones(2, 1, dtype=torch.int32))


STEPS = 6


def run_rank(rank: int, memory: Memory, found: torch.Tensor) -> None:
    """Writes to found [STEPS, 2 calls, 2, max_rows] which tokens this rank has in the end."""
    one, each = memory.rank(rank, 2 * memory.size), 2
    for step in range(STEPS):
        rows = memory.max_rows - step % 3
        values = torch.arange(float(rows)).unsqueeze(1) + torch.tensor([[0.0, 0.5]])
        one.columns(rows, each * rank, each).copy_(values + 100 * step + 10 * rank)
        logits = one.collect(rows)
        for call in range(2):  # sampled twice, as rows with more than a temperature are
            tokens = torch.zeros(2, rows, dtype=torch.int32)
            if rank == 0:
                tokens[0], tokens[1] = logits.sum(1) + call, step
            one.share_tokens(tokens)
            found[step, call, :, :rows] = tokens


def test_ranks_that_run_at_the_same_time() -> None:
    """What keeps a rank from writing its next logits too early is here the tokens that it waits for."""
    size, max_rows = 3, 4
    memory = Memory(size, max_rows, 16)
    found = [torch.zeros(STEPS, 2, 2, max_rows, dtype=torch.int32).share_memory_() for _ in range(size)]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, memory, found[rank]), daemon=True)
        for rank in reversed(range(size))
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * size
    for step in range(STEPS):
        rows = max_rows - step % 3
        sums = [6 * row + 600 * step + 61 for row in range(rows)]  # 1.5 for halves, 60 for ranks: 61.5, cut off
        for call in range(2):
            for one in found:
                assert one[step, call, :, :rows].tolist() == [[number + call for number in sums], [step] * rows]


def test_a_trial_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0 alone: the others have told before it waits, and their receipts are there."""
    monkeypatch.setattr(peer_logits, "_TRIALS", 1)
    monkeypatch.setattr(peer_logits, "ends_in_time", lambda stop: True)
    memory = Memory(2, 1, 8)
    first = memory.rank(0, 8)
    memory.flags.fill_(1)
    memory.logits.zero_()
    memory.logits[0, 1] = 1.0
    assert first._trial() == ""
    memory.flags.fill_(0)
    memory.receipts.fill_(1)
    memory.logits[0, 1] = 2.0
    assert first._trial() == "received wrong logits from a rank"
    monkeypatch.setattr(peer_logits, "ends_in_time", lambda stop: False)
    memory.flags.fill_(1)
    memory.receipts.fill_(0)
    assert first._trial() == "no data arrived from another rank"


@pytest.mark.parametrize(("rank", "opened", "num_bytes"), [(0, [1, 2], 4 * 256 * 2 + 24), (2, [0], 32)])
def test_rank_0_opens_all_and_the_others_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank: int, opened: list[int], num_bytes: int
) -> None:
    asked, allocated = [], []

    class Refused:
        def __init__(self, *arguments: object) -> None:
            allocated.append(arguments)
            raise OSError("cuMemAlloc_v2 says: out of memory")

    def access(device: torch.device, peer: int) -> bool:
        asked.append(peer - (device.index or 0) + rank)
        return True

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    monkeypatch.setattr(peer_logits, "PeerMemory", Refused)
    device = torch.device("cuda", 4 + rank)
    peers = Peers(rank, 3, device, lambda tensor: tensor.expand(3, -1), lambda value: value)
    with pytest.raises(OSError, match="out of memory"):
        PeerLogits.open(peers, 4, 200, torch.bfloat16)
    assert asked == opened
    assert allocated == [(num_bytes, 0 if rank == 0 else EMPTY, 4, device)]


def test_a_tensor_of_memory_that_somebody_owns() -> None:
    memory = torch.arange(12.0)
    seen = tensor_at(memory.data_ptr(), (3, 4), torch.float32, CPU)
    with torch.inference_mode():
        torch.mm(torch.ones(3, 2), torch.ones(2, 2), out=seen[:, 1:3])
    assert memory.view(3, 4).tolist() == [[0.0, 2.0, 2.0, 3.0], [4.0, 2.0, 2.0, 7.0], [8.0, 2.0, 2.0, 11.0]]
    assert (seen.device, seen.stride()) == (CPU, (4, 1))
