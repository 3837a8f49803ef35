"""Captured sampling gives what eager sampling gives, on all ranks."""

from __future__ import annotations

import torch
from hand_made_plans import EVERY_WISH, Driver, say
from tiny_runner import CPU, GREEDY, PROMPTS, MakeRunner

from minisgl_backend.kernels.sampling.layout import SAMPLING_GRAPHS, SEARCHES
from minisgl_backend.runner.async_output import UnsampledStep
from minisgl_backend.runner.graphs.whole import LARGEST_SAMPLING_GRAPH, EagerGraphRunner
from minisgl_backend.tensor_parallel import TensorParallel


class NotedGraphs(EagerGraphRunner):
    """Notes the sampling graphs that it replays."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self.replayed: list[tuple[int, int]] = []

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        self.replayed.append((size, sampling_graph))
        super().replay_sampling(size, sampling_graph)


MANY_PROMPTS = [list(range(1 + index, 3 + 2 * index)) for index in range(len(EVERY_WISH))]


def test_captured_sampling_changes_nothing(make_runner: MakeRunner) -> None:
    """Every option alone, in padded batches, and in one that is too large for it."""
    graphs = NotedGraphs((1, 4, 16, 24))
    eager, captured = make_runner(max_running=24), make_runner(max_running=24, graphs=graphs)
    assert graphs.sampling_sizes == (1, 4, 16)
    assert LARGEST_SAMPLING_GRAPH == 16
    expected = say(eager, EVERY_WISH, MANY_PROMPTS, 4)
    assert say(captured, EVERY_WISH, MANY_PROMPTS, 4) == expected
    assert not graphs.replayed
    # Batches with masks come before larger ones without: what they leave must mask nobody.
    for size in (1, 3, 13):
        for first in range(len(EVERY_WISH) - size, -1, -max(1, size // 2)):
            part = slice(first, first + size)
            assert say(captured, EVERY_WISH[part], MANY_PROMPTS[part], 4) == expected[part]
    assert {size for size, _ in graphs.replayed} == {1, 4, 16}
    # No search in a vocabulary that fits into one program.
    assert {graph for _, graph in graphs.replayed} == {graph for graph in SAMPLING_GRAPHS if not graph & SEARCHES}


class OtherRank(TensorParallel):
    """Two ranks in one thread: what rank 0 broadcasts is there when rank 1 asks for it."""

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        super().__init__(rank, 2, None, CPU)
        self._sent = sent

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self.rank == source:
            self._sent.append(tensor.clone())
            return tensor
        return tensor.copy_(self._sent.pop(0))


class NotedTokens:
    """Notes what is sent through shared memory; no logits of this single rank go that way."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def fits(self, rows: int) -> bool:
        return True

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        assert token_ids.is_contiguous()
        self.sent.append(token_ids.shape[1])


def test_tokens_of_decode_steps_alone_go_through_shared_memory(make_runner: MakeRunner) -> None:
    broadcast: list[torch.Tensor] = []
    tp, shared = OtherRank(0, broadcast), NotedTokens()
    tp.__dict__["_peer_logits"] = shared
    runner = make_runner(max_running=24, tp=tp, graphs=NotedGraphs((4, 24)))
    shared.sent.clear()
    driver = Driver(4)
    for row in range(2):
        driver.admit(row, PROMPTS[row], (GREEDY, EVERY_WISH[5])[row])
    plans = [driver.plan(prefill={row: len(PROMPTS[row]) for row in range(2)})]
    for decode in ((0,), (0, 1), ()):
        pending = runner.execute(runner.prepare(plans[-1]))
        driver.commit(plans[-1], pending.result().token_ids)
        plans.append(driver.plan(decode=decode))
    assert [tokens.shape[1] for tokens in broadcast] == [2], "of the prompts"
    assert shared.sent == [4, 4, 4], "row 1 is sampled again"


def test_the_other_ranks_make_the_collectives_of_captured_sampling(make_runner: MakeRunner) -> None:
    sent: list[torch.Tensor] = []
    graphs = NotedGraphs((4, 24))
    kinds = (NotedGraphs((4, 24)), graphs)
    first, second = (
        make_runner(max_running=24, tp=OtherRank(rank, sent), graphs=kind) for rank, kind in enumerate(kinds)
    )
    assert not sent, "both have captured the same ones"
    driver, wishes = Driver(4), [EVERY_WISH[index] for index in (2, 5, 14, 19)]
    for row, wish in enumerate(wishes):
        driver.admit(row, PROMPTS[row], wish)
    plan = driver.plan(prefill={row: len(prompt) for row, prompt in enumerate(PROMPTS)})
    for decode in ((0,), (0, 1), (3,), (1, 2, 3), (0, 1, 2, 3)):
        host = first.build(plan)
        pending = first.execute(first.upload(host))
        if isinstance(pending, UnsampledStep):
            first.sample(pending, first.no_masks(len(plan.sampled_rows)))
        mirrored = second.execute(second.mirror(plan, host.decisions)).result()
        assert mirrored.token_ids.tolist() == pending.result().token_ids.tolist()
        assert not sent
        assert torch.equal(first._table.tokens, second._table.tokens)
        driver.commit(plan, pending.result().token_ids)
        plan = driver.plan(decode=decode)
    assert len(graphs.replayed) == 3, "temperature alone decided one step, and the last one was only planned"
