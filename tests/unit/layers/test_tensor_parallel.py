"""Collectives between ranks, and models split over them, against the same model on one rank.

Ranks are threads here: there is no process-wide group, so one process may hold several.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from minisgl_backend import tensor_parallel
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.tensor_parallel import AllReduce, TensorParallel
from tests.layer_contexts import layer_context
from tests.parity.checkpoints import CHECKPOINTS, FIRST_OF_FAMILY, save_checkpoint
from tests.parity.paged import PagedModel

CPU = torch.device("cpu")


def summed(tp: TensorParallel, tensor: torch.Tensor) -> torch.Tensor:
    arrival = tp.begin_all_reduce(tensor)
    assert arrival is not None
    arrival()
    return tensor


def test_collectives() -> None:
    def work(tp: TensorParallel) -> tuple[list[float], list[list[int]], list[int], int]:
        mine = torch.tensor([tp.rank, 10 * tp.rank])
        gathered = tp.all_gather(mine).tolist()
        chosen = tp.broadcast(mine.clone(), source=1).tolist()
        return summed(tp, torch.tensor([1.0, tp.rank])).tolist(), gathered, chosen, tp.minimum(7 - tp.rank)

    expected = ([3.0, 3.0], [[0, 0], [1, 10], [2, 20]], [1, 10], 5)
    assert on_ranks(3, work) == [expected] * 3


def test_ranks_with_other_settings_do_not_meet() -> None:
    """The one whose settings differ says so; to the others it is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def rank_main(rank: int) -> str:
            ours = listener if rank == 0 else None
            shared = {"device": "cpu", "page_size": "16" if rank == 0 else "1"}
            with pytest.raises(EngineDeadError if rank == 0 else ConfigError) as refused:
                TensorParallel.connect(
                    rank, 2, "127.0.0.1", port, CPU, listener=ours, address="127.0.0.1", shared=shared, timeout_s=2
                )
            return str(refused.value)

        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(rank_main, range(2)))
    assert said[0].startswith("rank 0 of 2 could not join")
    assert said[1] == "page_size is 1 on rank 1; allowed: 16, as on rank 0"


def test_ranks_that_are_lost_as_they_meet_are_a_death() -> None:
    """Another one's store ends in the middle: nothing is wrong with this one's options."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lose() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(1)
                connection.close()

        thread = threading.Thread(target=lose, daemon=True)
        thread.start()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 could not join the others"):
            TensorParallel.connect(1, 2, "127.0.0.1", listener.getsockname()[1], CPU, timeout_s=2)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_one_rank_needs_no_group() -> None:
    tp = TensorParallel.connect(0, 1, "nowhere.invalid", 1, CPU)
    tensor = torch.ones(2)
    assert tp.begin_all_reduce(tensor) is None
    assert tp.micro_batches(100_000) == [100_000]
    assert tp.all_gather(tensor).shape == (1, 2)
    assert tp.minimum(3) == 3


def test_closing_never_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def __init__(self) -> None:
            self.released = threading.Event()
            self.aborts = 0

        def abort(self) -> None:
            self.aborts += 1
            self.released.wait()

    monkeypatch.setattr(tensor_parallel, "CLOSE_S", 0.05)
    group = Stuck()
    tp = TensorParallel(0, 2, group, torch.device("cuda", 0))
    started = time.monotonic()
    tp.close()
    tp.close()
    assert time.monotonic() - started < 5.0
    assert group.aborts == 1
    group.released.set()


def test_a_rank_outside_the_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2"):
        TensorParallel.connect(2, 2, "127.0.0.1", 1, CPU)


# Of a family its first checkpoint, and those whose ranks have other parts: biases, shared embeddings, files that are
# split, layers that differ, groups of experts.
MORE_ON_TWO = ("llama-bias-mha", "qwen3_moe-sharded-mixed", "phi3-longrope-partial-window", "olmo3-yarn-mha")
ON_TWO = (*FIRST_OF_FAMILY, *MORE_ON_TWO, "qwen2-tied", "glm4_moe-groups")
ON_FOUR = ("mistral-window", "qwen2-tied", "qwen3_moe")  # two KV heads, each on two ranks


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((one, 2) for one in ON_TWO),
        *((one, 4) for one in ON_FOUR),
        *(pytest.param(one, 2, marks=pytest.mark.full) for one in sorted(set(CHECKPOINTS) - set(ON_TWO))),
    ],
)
def test_a_split_model_computes_the_same(name: str, size: int, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    prompt = [5 + 7 * i % 300 for i in range(40)]

    def work(tp: TensorParallel) -> list[torch.Tensor]:
        paged = PagedModel(tmp_path, page_size=16, max_seq_len=64, max_rows=2, tp=tp)
        return [paged.step({0: prompt}, {})[0], paged.step({}, {0: 9})[0]]

    expected = work(TensorParallel.single())
    for logits in on_ranks(size, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "lanes"), [(1, [1]), (4095, [4095]), (4096, [2048, 2048]), (5000, [2560, 2440])])
def test_lanes(rows: int, lanes: list[int]) -> None:
    assert TensorParallel(0, 2, None, CPU).micro_batches(rows) == lanes


def test_ways_of_sums() -> None:
    """By memory that is shared: short ones, and long ones that are not captured, up to what it holds."""
    tp = TensorParallel(0, 2, None, CPU)
    assert tp.all_reduce_for(1, captured=True) is AllReduce.NCCL
    assert tp.all_reduce_for(4096, captured=False) is AllReduce.NCCL
    tp.__dict__["_peer_sums"], tp.__dict__["_peer_copies"] = SharedMemory(tp, 2000), SharedCopies(tp, 2560)
    ways = {
        rows: [tp.all_reduce_for(rows, captured=captured) for captured in (False, True)]
        for rows in (1, 3000, 5120, 5121)
    }
    assert ways == {
        1: [AllReduce.FUSED_IN_NORM] * 2,
        3000: [AllReduce.NCCL] * 2,
        5120: [AllReduce.COPY_ENGINE, AllReduce.NCCL],
        5121: [AllReduce.NCCL] * 2,
    }


@pytest.mark.parametrize(
    ("size", "rows", "longest"), [(1, 9000, 9000), (2, 4095, 4095), (2, 4096, 4095), (2, 8192, 4096), (4, 9000, 4608)]
)
def test_the_longest_micro_batch(size: int, rows: int, longest: int) -> None:
    assert TensorParallel(0, size, None, CPU).longest_micro_batch(rows) == longest


@pytest.mark.parametrize("shared_memory", ["none", "sums", "sums and copies"])
@pytest.mark.parametrize("name", ["llama-bias-mha", "qwen2-tied", "qwen3_moe-sharded-mixed", "cohere2"])
def test_a_split_model_in_two_micro_batches(
    name: str, shared_memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of one half of a prompt run beside the products of the other half, with every token wanted or the last."""
    monkeypatch.setattr(tensor_parallel, "OVERLAP_ROWS", 16)
    monkeypatch.setattr(tensor_parallel, "MICRO_BATCH_ROWS", 8)
    save_checkpoint(name, tmp_path)
    prompt = [5 + 7 * i % 300 for i in range(41)]

    def work(tp: TensorParallel) -> list[torch.Tensor]:
        if tp.size > 1 and "sums" in shared_memory:
            tp.__dict__["_peer_sums"] = SharedMemory(tp, 100)
        copies = SharedCopies(tp, 24)
        if tp.size > 1 and "copies" in shared_memory:
            tp.__dict__["_peer_copies"] = copies
        paged = PagedModel(tmp_path, page_size=16, max_seq_len=64, max_rows=2, tp=tp)
        logits = [paged.step({int(last): prompt}, {}, last_only=last)[int(last)] for last in (False, True)]
        assert (copies.sums > 0) is (tp.size > 1 and "copies" in shared_memory)
        return [*logits, paged.step({}, {0: 9})[0]]

    expected = work(TensorParallel.single())
    for logits in on_ranks(2, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class SharedMemory:
    """Stands in for sums through the GPUs' shared memory: up to `most` rows, by the ranks' own collectives."""

    def __init__(self, tp: TensorParallel, most: int) -> None:
        self._tp = tp
        self._most = most
        self.sums = 0

    def fits(self, rows: int) -> bool:
        return rows <= self._most

    def reduce_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(partial) <= self._most
        self.sums += 1
        residual += self._tp.all_gather(partial).sum(0)
        return residual, TorchOps().rms_norm(residual, weight, eps)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class SharedCopies(SharedMemory):
    """Likewise for parts that are sent ahead."""

    def __init__(self, tp: TensorParallel, most: int) -> None:
        super().__init__(tp, most)
        self._on_their_way: list[torch.Tensor] = []

    def send(self, partial: torch.Tensor) -> torch.Tensor:
        self._on_their_way.append(partial)
        assert len(self._on_their_way) <= 2
        return partial

    def add_norm(
        self,
        sent: torch.Tensor,
        partial: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert sent is partial is self._on_their_way.pop(0)
        return self.reduce_norm(partial, residual, weight, eps)


class SharedLogits:
    """Stands in for logits through the GPUs' shared memory: up to two rows, by the memory of the ranks' threads."""

    logits = torch.empty(2, 16)
    tokens = torch.empty(2, 2, dtype=torch.int32)

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp

    def fits(self, rows: int) -> bool:
        return rows <= 2

    def columns(self, rows: int, start: int, count: int) -> torch.Tensor:
        return self.logits[:rows, start : start + count]

    def collect(self, rows: int) -> torch.Tensor:
        self._tp.minimum(0)
        return self.logits[:rows, :10] if self._tp.rank == 0 else torch.empty(rows, 0)

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        if self._tp.rank == 0:
            self.tokens[:, : token_ids.shape[1]] = token_ids
        self._tp.minimum(0)
        token_ids.copy_(self.tokens[:, : token_ids.shape[1]])

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_logits_of_decode_steps_are_rank_0s(size: int) -> None:
    """A vocabulary that does not divide, of which the last of six ranks has nothing; and more rows than fit."""

    def work(tp: TensorParallel) -> list[torch.Tensor]:
        from minisgl_backend.layers.embedding import ParallelLMHead

        layer = ParallelLMHead(10, 4, "lm_head", layer_context(torch.float32, tp), None)
        weight = torch.arange(40.0).view(10, 4)
        (part,) = layer.method.weight_parts()
        part.target.copy_(weight[part.start : part.start + len(part.target)])
        gathered = layer.on_rank_0(torch.ones(2, 4))
        tp.__dict__["_peer_logits"] = SharedLogits(tp)
        found = [gathered, layer.on_rank_0(torch.ones(3, 4)), layer.on_rank_0(torch.ones(2, 4)).clone()]
        for rows in (2, 3):
            tokens = torch.full((2, rows), tp.rank + 5, dtype=torch.int32)
            assert tp.share_tokens(tokens) is tokens
            found.append(tokens)
        return found

    expected = torch.arange(40.0).view(10, 4).sum(1)
    for rank, (gathered, many, few, *tokens) in enumerate(on_ranks(size, work)):
        assert torch.equal(gathered, expected.expand(2, 10))
        assert torch.equal(many, expected.expand(3, 10))
        assert torch.equal(few, expected.expand(2, 10)) if rank == 0 else few.shape == (2, 0)
        assert [one.tolist() for one in tokens] == [[[5] * 2] * 2, [[5] * 3] * 2]


def test_memory_that_ranks_share_is_stopped_then_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Shared:
        def __init__(self, name: str) -> None:
            self._name = name

        def stop(self) -> None:
            done.append(f"stop {self._name}")

        def close(self) -> None:
            done.append(f"close {self._name}")
            raise OSError("a device that failed")

    class Group:
        def abort(self) -> None:
            pass

    tp = TensorParallel(0, 2, Group(), torch.device("cuda", 0))
    tp.__dict__.update(_peer_sums=Shared("sums"), _peer_logits=Shared("logits"))
    tp.close()
    tp.close()
    assert done == ["stop sums", "stop logits", "close sums", "close logits"]


@pytest.mark.parametrize("most", [1, 40])
@pytest.mark.parametrize("name", ["llama-bias-mha", "qwen3_moe-sharded-mixed"])
def test_a_split_model_whose_norms_add_up_the_ranks(name: str, most: int, tmp_path: Path) -> None:
    """The prompt's sums and the decode step's, or those of the decode step and of the prompt's last token alone."""
    save_checkpoint(name, tmp_path)
    prompt = [5 + 7 * i % 300 for i in range(40)]

    def work(tp: TensorParallel) -> list[torch.Tensor]:
        if tp.size > 1:
            shared = SharedMemory(tp, most)
            tp.__dict__["_peer_sums"] = shared
        paged = PagedModel(tmp_path, page_size=16, max_seq_len=64, max_rows=2, tp=tp)
        logits = [paged.step({0: prompt}, {}, last_only=True)[0], paged.step({}, {0: 9})[0]]
        if tp.size > 1:
            layers = paged.model.config.num_layers
            assert shared.sums == (4 * layers if most == 40 else 2 * layers + 2)
        return logits

    expected = work(TensorParallel.single())
    for logits in on_ranks(2, work):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    save_checkpoint("llama-bias-mha", tmp_path)  # 320 tokens, 4 heads

    def work(tp: TensorParallel) -> torch.Tensor:
        from minisgl_backend.layers.embedding import ParallelLMHead

        layer = ParallelLMHead(10, 4, "lm_head", layer_context(torch.float32, tp), None)
        weight = torch.arange(40.0).view(10, 4)
        (part,) = layer.method.weight_parts()
        part.target.copy_(weight[part.start : part.start + len(part.target)])
        return layer(torch.ones(2, 4))

    expected = torch.arange(40.0).view(10, 4).sum(1).expand(2, 10)
    for logits in on_ranks(3, work):
        assert torch.equal(logits, expected)
