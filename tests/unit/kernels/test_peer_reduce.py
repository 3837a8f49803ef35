"""The sum over ranks with its norm, in Triton's interpreter: in one process, where first all ranks send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.multiprocessing as multiprocessing

from minisgl_backend.kernels.torch_ops import TorchOps

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_collectives.py runs the kernel compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.collectives import two_shot_norm
from minisgl_backend.kernels.collectives.all_reduce_norm import Inboxes, empty_word, reduce_norm
from minisgl_backend.kernels.collectives.two_shot_norm import TwoShotInboxes

EPS = 1e-6
WORDS = {2: torch.int16, 4: torch.int32}
KINDS: dict[int, tuple[type[Inboxes], Callable[..., tuple[torch.Tensor, torch.Tensor]], tuple[str, ...]]] = {
    1: (Inboxes, reduce_norm, ("send", "receive")),
    2: (TwoShotInboxes, two_shot_norm.reduce_norm, ("send", "sum", "receive")),
}


class Ranks:
    """Ranks whose inboxes are in this process's memory: of sums in so many shots."""

    def __init__(
        self, size: int, max_rows: int, hidden: int, dtype: torch.dtype, *, num_programs: int = 1, shots: int = 1
    ) -> None:
        self.kind, self.reduce_norm, self.parts = KINDS[shots]
        count = self.kind.num_bytes(size, max_rows, hidden, dtype) // dtype.itemsize
        self.inboxes = [torch.full((count,), empty_word(dtype), dtype=WORDS[dtype.itemsize]) for _ in range(size)]
        self.stop = torch.zeros(1, dtype=torch.int32)
        self.views = [
            view(self.kind, rank, self.inboxes, (max_rows, hidden), self.stop, num_programs) for rank in range(size)
        ]

    def sum(
        self, partials: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each rank's result, where all ranks end a part before one begins the next."""
        whole = [(residual.clone(), torch.empty_like(residual)) for _ in partials]
        for part in self.parts:
            for one, partial, (hidden, normed) in zip(self.views, partials, whole, strict=True):
                turns = one.turns.clone()
                _, out = self.reduce_norm(partial, hidden, weight, EPS, one, parts=(part,))
                written = (one.turns != turns)[: len(out)]
                normed[written] = out[written]
        return whole


def view(
    kind: type[Inboxes], rank: int, inboxes: list[torch.Tensor], shape: tuple[int, int], stop: torch.Tensor, count: int
) -> Inboxes:
    """What this rank is told. shape: most rows, hidden; count: of programs."""
    return kind(
        rank=rank,
        size=len(inboxes),
        max_rows=shape[0],
        hidden=shape[1],
        addresses=torch.tensor([inbox.data_ptr() for inbox in inboxes]),
        turns=torch.zeros(shape[0], dtype=torch.int32),
        stop=stop.data_ptr(),
        num_programs=count,
    )


def test_turns_do_not_count() -> None:
    """A count would overflow after a day of steps, and name a place before the memory."""
    ranks = Ranks(2, 2, 64, torch.bfloat16)
    for call in range(5):
        ranks.sum([torch.ones(1, 64).bfloat16()] * 2, torch.zeros(1, 64).bfloat16(), torch.ones(64).bfloat16())
        assert [view.turns.tolist() for view in ranks.views] == [[(call + 1) % 2, 0]] * 2


def expected_of(
    partials: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Added in float32 in the order of the ranks, rounded once."""
    total = torch.zeros(residual.shape)
    for partial in partials:
        total = total + partial.float()
    hidden = (total + residual.float()).to(residual.dtype)
    return hidden, TorchOps().rms_norm(hidden, weight, EPS)


@pytest.mark.parametrize("shots", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_rank_gets_the_same_sum_call_after_call(shots: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    hidden = 24
    ranks = Ranks(size, 12, hidden, dtype, num_programs=2, shots=shots)
    weight = torch.randn(hidden).to(dtype)
    for rows in (1, 6, 3, 12, 3, 1, 5, 6):  # rows that a call has not keep the turn that they were at
        partials = [torch.randn(rows, hidden).to(dtype) for _ in range(size)]
        partials[0][0, :4] = -0.0
        partials[1][0, :2] = torch.tensor([-0.0, 7.0])
        residual = torch.randn(rows, hidden).to(dtype)
        results = ranks.sum(partials, residual, weight)
        summed, normed = expected_of(partials, residual, weight)
        for ours, our_norm in results:
            assert torch.equal(ours, summed)
            torch.testing.assert_close(our_norm, normed, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=0)
            assert torch.equal(our_norm, results[0][1])
        assert all(bool((inbox == empty_word(dtype)).all()) for inbox in ranks.inboxes)


def test_what_is_no_number_travels() -> None:
    ranks = Ranks(2, 1, 8, torch.float32)
    partials = [torch.full((1, 8), float("nan")), torch.full((1, 8), float("inf"))]
    for hidden, _ in ranks.sum(partials, torch.zeros(1, 8), torch.ones(8)):
        assert bool(hidden.isnan().all())


def test_a_sum_that_waits_in_vain_ends_when_it_is_told_to() -> None:
    ranks = Ranks(2, 1, 8, torch.float32)
    ranks.stop.fill_(1)
    reduce_norm(torch.ones(1, 8), torch.ones(1, 8), torch.ones(8), EPS, ranks.views[0])
    in_two_shots = Ranks(2, 2, 8, torch.float32, shots=2)
    in_two_shots.stop.fill_(1)  # the other rank sends neither its part nor its sum
    two_shot_norm.reduce_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), EPS, in_two_shots.views[0])


def run_rank(
    rank: int, inboxes: list[torch.Tensor], stop: torch.Tensor, inputs: torch.Tensor, out: torch.Tensor, shots: int
) -> None:
    """inputs [calls, ranks, rows, hidden]; writes [calls, 2, rows, hidden] to `out`."""
    kind, summed, _ = KINDS[shots]
    one = view(kind, rank, inboxes, (inputs.shape[2], inputs.shape[3]), stop, 2)
    for call, partials in enumerate(inputs):
        rows, hidden = one.max_rows - call % 3, one.hidden
        pace = {"ahead": call % 4} if shots == 1 else {"pace": (call % 4, call % 3)}
        result = summed(partials[rank, :rows], torch.ones(rows, hidden), torch.ones(hidden), EPS, one, **pace)
        out[call, 0, :rows], out[call, 1, :rows] = result


@pytest.mark.parametrize("shots", KINDS)
def test_ranks_that_run_at_the_same_time(shots: int) -> None:
    """In two processes, where one waits for the other, after it has sent all of a program's rows or some."""
    size, max_rows, hidden, calls = 2, 8, 8, 8
    torch.manual_seed(0)
    inputs = torch.randn(calls, size, max_rows, hidden)
    count = KINDS[shots][0].num_bytes(size, max_rows, hidden, torch.float32) // 4
    inboxes = [torch.full((count,), empty_word(torch.float32), dtype=torch.int32).share_memory_() for _ in range(size)]
    outs = [torch.zeros(calls, 2, max_rows, hidden).share_memory_() for _ in range(size)]
    stop = torch.zeros(1, dtype=torch.int32).share_memory_()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, inboxes, stop, inputs, outs[rank], shots), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * size
    for call in range(calls):
        rows = max_rows - call % 3
        summed, normed = expected_of(list(inputs[call, :, :rows]), torch.ones(rows, hidden), torch.ones(hidden))
        for out in outs:
            assert torch.equal(out[call, 0, :rows], summed)
            torch.testing.assert_close(out[call, 1, :rows], normed, rtol=1e-6, atol=1e-6)
    assert torch.equal(outs[0], outs[1])
    assert all(bool((inbox == empty_word(torch.float32)).all()) for inbox in inboxes)
