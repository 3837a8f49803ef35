"""Random plans on the device against an obvious copy of the tables in Python lists."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hand_made_plans import Driver

from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kv.groups import CacheGroup, ColumnLayout
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner import staging
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import graph_sizes
from minisgl_backend.runner.plan_arrays import expand
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.step_tensors import StepTensors
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.sampling.params import encode_params
from minisgl_backend.step import StepPlan

CPU = torch.device("cpu")
ROWS, MAX_SEQ_LEN = 5, 40


class Mirror:
    """What the tables should hold, written the slow way."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, int, int], int] = {}  # by cache group, row and column
        self.tokens: dict[tuple[int, int], int] = {}

    def apply(self, plan: StepPlan) -> None:
        groups = plan.page_groups if len(plan.page_groups) else np.zeros_like(plan.page_rows)
        for group, row, column, page in zip(groups, plan.page_rows, plan.page_columns, plan.page_ids, strict=True):
            self.pages[int(group), int(row), int(column)] = int(page)
        for admitted in plan.admitted:
            for position, token in enumerate(admitted.token_ids.tolist()):
                self.tokens[admitted.row, position] = token


def make_builder(page_size: int = 4, num_groups: int = 1) -> tuple[RowTable, BatchBuilder]:
    table = RowTable(
        max_running=ROWS,
        max_seq_len=MAX_SEQ_LEN,
        page_size=page_size,
        device=CPU,
        columns=ColumnLayout([CacheGroup()] * num_groups),
    )
    return table, BatchBuilder(table, SamplingRows(table.max_rows, 100, (), table.max_seq_len, CPU))


def check(step: StepTensors, plan: StepPlan, table: RowTable, mirror: Mirror, page_size: int) -> None:
    rows, positions = step.tokens()
    expected = [(c.row, p) for c in plan.prefill for p in range(c.start, c.end)]
    expected += [(int(r), int(n) - 1) for r, n in zip(plan.decode_rows, plan.decode_lengths, strict=True)]
    count = len(expected)
    assert list(zip(rows.tolist(), positions.tolist(), strict=True))[:count] == expected
    token_ids, slots = table.lookup(rows, positions)
    assert token_ids.tolist()[:count] == [mirror.tokens[place] for place in expected]
    assert len(slots) == max(1, len(table.page_tables))
    for group, of_group in enumerate(slots):
        assert of_group.tolist()[:count] == [
            mirror.pages[group, row, p // page_size] * page_size + p % page_size for row, p in expected
        ]
    sampled = [(c.row, c.end) for c in plan.prefill if c.samples]
    sampled += list(zip(plan.decode_rows.tolist(), plan.decode_lengths.tolist(), strict=True))
    assert list(zip(step.sampling.rows.tolist(), step.sampling.positions.tolist(), strict=True)) == sampled
    assert step.num_sampled == len(sampled) == len(plan.sampled_rows)
    if step.logits_indices is not None:
        checked = [(c.row, c.end) for c in plan.prefill if not c.samples]
        assert list(step.checked_rows) == [row for row, _ in checked]
        lines = step.logits_indices.tolist()
        assert [(expected[line][0], expected[line][1] + 1) for line in lines] == sampled + checked


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(), (1, 2, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans(page_size: int, sizes: tuple[int, ...], seed: int) -> None:
    rng, num_groups = np.random.default_rng(seed), 1 + seed % 3
    table, builder = make_builder(page_size, num_groups)
    driver, mirror = Driver(page_size, num_groups), Mirror()
    for _ in range(60):
        for row in range(ROWS):
            known = driver.tokens.get(row)
            if known is None or (len(known) >= MAX_SEQ_LEN - 1 or rng.random() < 0.03):
                driver.admit(row, rng.integers(0, 100, rng.integers(1, 20)).tolist(), SamplingParams(seed=row))
        order = rng.permutation(ROWS).tolist()
        left = {row: len(driver.tokens[row]) - driver.computed[row] for row in order}
        fresh = {admitted.row for admitted in driver.pending}
        ready = [r for r in order if left[r] == 1 and r not in fresh and rng.random() < 0.8]
        prefill = {r: int(rng.integers(1, left[r] + 1)) for r in order if left[r] > 1 or r in fresh}
        plan = driver.plan(prefill=prefill if rng.random() < 0.5 or fresh else {}, decode=tuple(ready))
        if not plan.num_tokens:
            continue
        mirror.apply(plan)
        host = builder.build_host(plan, graph_sizes=sizes)
        step = builder.upload(host)
        check(step, plan, table, mirror, page_size)
        if step.decisions.graph_size:
            assert step.decisions.graph_size == min(size for size in sizes if size >= len(ready))
            assert step.decode is not None
            assert step.decode.rows.tolist()[len(ready) :] == [ROWS] * (step.decisions.graph_size - len(ready))
            assert step.decode.kv_lens_host.tolist() == step.decode.kv_lens.tolist()
        token_ids = rng.integers(0, 100, step.num_sampled).astype(np.int32)
        table.write_tokens(step.sampling.rows, step.sampling.positions, torch.from_numpy(token_ids))
        for place, token in zip(
            zip(step.sampling.rows.tolist(), step.sampling.positions.tolist(), strict=True), token_ids, strict=True
        ):
            mirror.tokens[place] = int(token)
        driver.commit(plan, token_ids)


def test_an_upload_larger_than_the_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "ORDINARY_EXTRA", 64)
    table, builder = make_builder()
    driver, mirror = Driver(4), Mirror()
    for length in (3, 30, 4):
        driver.admit(0, list(range(length)), SamplingParams(seed=1))
        driver.admit(1, list(range(50, 50 + length)), SamplingParams(seed=1))
        plan = driver.plan(prefill={0: length, 1: length})
        mirror.apply(plan)
        check(builder.upload(builder.build_host(plan)), plan, table, mirror, 4)


@pytest.mark.parametrize("extra", [staging.ORDINARY_EXTRA, 8])
def test_every_array_is_aligned(monkeypatch: pytest.MonkeyPatch, extra: int) -> None:
    """To 16 bytes: kernels are compiled anew for pointers that are not. Also where a step has a buffer of its own."""
    monkeypatch.setattr(staging, "ORDINARY_EXTRA", extra)
    buffer = staging.Staging(5, torch.device("cpu"))
    counts = np.arange(4, dtype=np.int32)
    arrays = {"one": counts[:1], "three": counts[:3], "none": counts[:0], "lines": np.ones((3, 3), dtype=np.int32)}
    for _ in range(2):
        uploaded = buffer.upload(buffer.fill(counts, counts + 1, arrays))
        assert {name: tensor.tolist() for name, tensor in uploaded.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }
        begins = [buffer.rows, buffer.lengths, *uploaded.values()]
        assert len({tensor.data_ptr() % 16 for tensor in begins if tensor.numel()}) == 1
        assert (buffer.rows[:4].tolist(), buffer.lengths[:4].tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])


def test_the_decode_part_never_moves() -> None:
    """Captured graphs read it where it was at capture."""
    _, builder = make_builder()
    padding = builder.padding_inputs(4)
    driver = Driver(4)
    for row in range(3):
        driver.admit(row, [1, 2, 3], SamplingParams(seed=1))
    builder.upload(builder.build_host(driver.plan(prefill={0: 3, 1: 3, 2: 3})))
    for _ in range(3):
        step = builder.upload(builder.build_host(driver.plan(decode=(2, 0, 1)), graph_sizes=(1, 4)))
        assert step.decode is not None
        assert step.decisions.graph_size == 4
        assert step.decode.rows.data_ptr() == padding.rows.data_ptr()
        assert step.decode.kv_lens.data_ptr() == padding.kv_lens.data_ptr()
        assert padding.rows.tolist() == [2, 0, 1, ROWS]
        assert padding.kv_lens.tolist() == [*step.sampling.positions.tolist(), 1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_lone_prompt_goes_where_its_graph_reads_it(page_size: int, num_groups: int) -> None:
    table, builder = make_builder(page_size, num_groups)
    inputs = {size: builder.prompt_tensors(size) for size in (6, 32)}
    driver, mirror = Driver(page_size, num_groups), Mirror()
    for row, length, size in ((0, 20, 32), (2, 5, 6), (1, 32, 32), (2, 1, 6)):
        driver.admit(row, list(range(40, 40 + length)), SamplingParams(seed=1, repetition_penalty=1.5))
        plan = driver.plan(prefill={row: length})
        mirror.apply(plan)
        host = builder.build_host(plan, prompt_sizes=(6, 32))
        assert host.decisions.prompt_size == size
        builder.send_prompt(host)
        step, sent = builder.follow_prompt(host), inputs[size]
        padding = [0] * (size - length)
        assert sent.token_ids.tolist() == [*range(40, 40 + length), *padding]
        assert sent.positions.tolist() == [*range(length), *padding]
        expected = [
            [mirror.pages[group, row, p // page_size] * page_size + p % page_size for p in range(length)]
            for group in range(num_groups)
        ]
        assert [slots.tolist() for slots in sent.slots] == [[*places, *padding] for places in expected]
        assert sent.last_index.tolist() == [length - 1]
        assert sent.attention.cu_seqlens_q.tolist() == [0, length]
        assert sent.attention.kv_lens.tolist() == [length]
        pages = -(-length // page_size)
        for group, live in enumerate(table.page_tables or (table.page_table,)):
            assert sent.attention.of(group).page_table[0, :pages].tolist() == live[row, :pages].tolist()
        rows, positions = torch.full((length,), row), torch.arange(length)
        token_ids, slots = table.lookup(rows, positions)
        assert token_ids.tolist() == list(range(40, 40 + length))
        assert [of_group.tolist() for of_group in slots] == expected
        assert (step.sampling.rows.tolist(), step.sampling.positions.tolist()) == ([row], [length])
        assert builder.mirror_host(plan, host.decisions).decisions == host.decisions


def test_what_is_no_lone_prompt_takes_no_pass_of_one() -> None:
    _, builder = make_builder()
    driver = Driver(4)

    def size(plan: StepPlan) -> int:
        return builder.build_host(plan, prompt_sizes=(8, 16)).decisions.prompt_size

    driver.admit(0, [1] * 20, SamplingParams(seed=1))
    assert size(driver.plan(prefill={0: 16})) == 16
    assert size(driver.plan(prefill={0: 4})) == 0, "the row was admitted before"
    driver.admit(1, [1] * 17, SamplingParams(seed=1))
    assert size(driver.plan(prefill={1: 17})) == 0, "it is too long"
    driver.admit(2, [1] * 3, SamplingParams(seed=1))
    assert size(driver.plan(prefill={2: 3}, decode=(0,))) == 0, "another row decodes"
    driver.admit(3, [1] * 3, SamplingParams(seed=1, prompt_logprobs=1))
    assert size(driver.plan(prefill={3: 3})) == 0, "all of its hidden states are needed"
    driver.admit(3, [1] * 3, SamplingParams(seed=1))
    driver.admit(4, [1] * 3, SamplingParams(seed=1))
    plan = driver.plan(prefill={3: 3})
    assert size(plan) == 0, "another row is admitted"
    driver.admit(3, [1] * 3, SamplingParams(seed=1))
    plan = driver.plan(prefill={3: 3})
    assert size(plan) == 8
    assert size(msgspec.structs.replace(plan, cleared_pages=np.ones(1, dtype=np.int32))) == 0, (
        "pages are cleared before"
    )
    more = {"page_rows": [3, 1], "page_columns": [0, 0], "page_ids": [9, 8]}
    assert size(msgspec.structs.replace(plan, **{k: np.array(v, dtype=np.int32) for k, v in more.items()})) == 0


def test_parameters_keep_their_bits() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=-0.5, seed=2**64 - 2
    )
    line = encode_params(params, 10**9)
    assert line[1] == 40
    assert line[[0, 2, 3, 4, 5, 6]].view(np.float32) == pytest.approx([0.7, 0.9, 0.1, 1.1, -0.5, 0.0])
    assert line[7:9].view(np.uint32).tolist() == [2**32 - 2, 2**32 - 1]
    assert line[9] == layout.RANDOM | layout.USES_MIN_P | layout.RANKED | layout.PENALTIES
    for greedy in (
        SamplingParams(temperature=0.0, top_p=0.1),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-9),
    ):
        plain = encode_params(SamplingParams(temperature=0.0), 10**9)
        assert encode_params(greedy, 10**9)[:4].tolist() == plain[:4].tolist()


def test_expand() -> None:
    rows, positions = expand(*(np.array(one, dtype=np.int32) for one in ([7, 2, 5], [3, 0, 10], [2, 0, 3])))
    assert rows.dtype == positions.dtype == np.int32
    assert rows.tolist() == [7, 7, 5, 5, 5]
    assert positions.tolist() == [3, 4, 10, 11, 12]


def test_graph_sizes() -> None:
    assert graph_sizes(0) == ()
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(300)[-3:] == (256, 288, 300)
