"""A model runner that is fed known tokens and gives the logits of every position: what parity is measured on.

The runner, its operations, its attention and its captured graphs are the engine's own; only the step plans are made
here, and what the sampler chose is overwritten by the known tokens after every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.parity_reference import Sequences
from minisgl_backend.attention.base import AttentionSpec, DecodeInputs
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import (
    CudaGraphRunner,
    DecodeOutputs,
    DecodeSteps,
    GraphRunner,
    graph_sizes,
)
from minisgl_backend.runner.model_runner import Batch, Captures, ModelRunner
from minisgl_backend.runner.row_state import RowState
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan, Wants

_SLAB = 256  # positions whose logits the runner would compute at once
_GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(frozen=True)
class Step:
    """Chunks of prompts, (row, start, end), and rows that take one token."""

    chunks: tuple[tuple[int, int, int], ...]
    decode: tuple[int, ...]


def schedule(sequences: Sequences, chunk: int) -> Iterator[Step]:
    """All kinds of step that the engine knows.

    The first prompt alone (few rows, if it is short); the others together, cut after `chunk` tokens; the rest of the
    long ones, now behind a cached prefix, beside the first tokens of those that are done; then one token for each
    sequence in turn, in batches of all, half, three and one.
    """
    lengths = sequences.prompt_lengths
    rows = range(len(lengths))
    yield Step(((0, 0, lengths[0]),), ())
    if len(lengths) > 1:
        yield Step(tuple((row, 0, min(chunk, lengths[row])) for row in rows[1:]), ())
    left = [len(tokens) - length for tokens, length in zip(sequences.tokens, lengths, strict=True)]
    for start in range(chunk, max(lengths[1:], default=0), chunk):
        chunks = tuple((row, start, min(start + chunk, lengths[row])) for row in rows[1:] if lengths[row] > start)
        done = tuple(row for row in rows if (row == 0 or lengths[row] <= start) and left[row])
        yield Step(chunks, done)
        for row in done:
            left[row] -= 1
    sizes = (len(lengths), max(1, len(lengths) // 2), 3, 1)
    turn = 0
    while any(left):
        active = [row for row in rows if left[row]]
        size = sizes[turn % len(sizes)]
        for begin in range(0, len(active), size):
            yield Step((), tuple(active[begin : begin + size]))
        left = [max(0, count - 1) for count in left]
        turn += 1


class LogitsRunner:
    """One runner for one backend and page size. `run` may be called once: rows are never given back."""

    def __init__(
        self,
        model: CausalLM,
        backend: str,
        sequences: Sequences,
        *,
        page_size: int,
        max_seq_len: int,
        graphs: GraphRunner | None = None,
    ) -> None:
        """`backend`: a name or `PREFILL,DECODE`. `graphs`: None for the engine's choice.

        Raises ConfigError where the backend cannot serve this model on this machine.
        """
        self._model, self._sequences, self.page_size = model, sequences, page_size
        weight = next(model.parameters())
        self.device = weight.device
        max_running = len(sequences.tokens)
        spec = attention_spec(
            model.config,
            AttentionSpec(
                page_size=page_size,
                max_seq_len=max_seq_len,
                max_rows=max_running + 1,
                dtype=weight.dtype,
                device=self.device,
            ),
            tp_size=1,
        )
        names = backend.split(",")
        attention = create_attention(names[0], names[-1], spec)
        self._table = RowTable(
            max_running=max_running,
            max_seq_len=max_seq_len,
            page_size=page_size,
            device=self.device,
            columns=spec.columns,
        )
        config, table = model.config, self._table
        sampling = SamplingRows(table.max_rows, config.vocab_size, config.eos_token_ids, max_seq_len, self.device)
        self._groups = spec.columns.of_rows(page_size)
        self._counts = [self._groups.pages_for(len(tokens)) for tokens in sequences.tokens]
        self._tap = _TappedModel(model)
        graphs = graphs or _graphs(attention, self.device, max_running)
        self._graphs = _TappedGraphs(graphs) if graphs is not None else None
        self._runner = ModelRunner(
            model=self._tap,
            attention=attention,
            pool=KVPool(spec.places, page_size, self._groups.num_pages * sum(self._counts), self.device),
            rows=RowState.of(self._table, sampling),
            captures=Captures(graphs=self._graphs, longest_prefill=max_seq_len),
        )

    @torch.inference_mode()
    def run(self, chunk: int) -> torch.Tensor:
        """The logits of every position, [num_tokens, vocab_size] on the device in the model's number format.

        Sequences lie end to end. Raises RuntimeError for logits that are not finite.
        """
        offsets, vocab_size = self._sequences.offsets, self._model.config.vocab_size
        weight = next(self._model.parameters())
        logits = torch.empty(offsets[-1], vocab_size, dtype=weight.dtype, device=self.device)
        lengths = np.zeros(len(self._sequences.tokens), dtype=np.int32)
        for number, step in enumerate(schedule(self._sequences, chunk)):
            for row, _, end in step.chunks:
                lengths[row] = end
            lengths[list(step.decode)] += 1
            plan = self._plan(number, step, lengths)
            batch = self._runner.prepare(plan)
            assert isinstance(batch, Batch), "only captured forward passes take a lone prompt"
            result = self._runner.execute(batch).result()
            if result.failed_rows:
                raise RuntimeError(f"logits of rows {sorted(result.failed_rows)} are not finite in step {number}")
            spans = [range(offsets[row] + start, offsets[row] + end) for row, start, end in step.chunks]
            lines = [line for span in spans for line in span]
            lines += [offsets[row] + int(lengths[row]) - 1 for row in step.decode]
            logits[torch.tensor(lines, device=self.device)] = self._step_logits(batch)
            self._force(plan.sampled_rows.tolist(), lengths)
        return logits

    def _plan(self, number: int, step: Step, lengths: np.ndarray) -> StepPlan:
        tokens, prompts = self._sequences.tokens, self._sequences.prompt_lengths
        chunks = tuple(
            PrefillChunk(
                row,
                start,
                np.array(tokens[row][start:end], dtype=np.int32),
                Wants.TOKEN if end == prompts[row] else Wants.NOTHING,
            )
            for row, start, end in step.chunks
        )
        rows = np.array(step.decode, dtype=np.int32)
        pages = self._all_pages() if number == 0 else np.zeros((4, 0), dtype=np.int32)
        return StepPlan(
            step=number,
            admitted=self._all_rows() if number == 0 else (),
            page_groups=pages[0],
            page_rows=pages[1],
            page_columns=pages[2],
            page_ids=pages[3],
            prefill=chunks,
            decode_rows=rows,
            decode_lengths=lengths[rows].astype(np.int32),
            decode_uids=rows.astype(np.int64),
        )

    def _all_rows(self) -> tuple[AdmittedRow, ...]:
        return tuple(
            AdmittedRow(row, row, _GREEDY, length, np.array(tokens[:length], dtype=np.int32), 0)
            for row, (tokens, length) in enumerate(
                zip(self._sequences.tokens, self._sequences.prompt_lengths, strict=True)
            )
        )

    def _all_pages(self) -> np.ndarray:
        """Place in a column, row, column and id of every page, int32 [4, num_pages]: scattered, so that a wrong page
        table shows."""
        rows = np.repeat(np.arange(len(self._counts)), self._counts)
        columns = np.concatenate([np.arange(count) for count in self._counts])
        count = self._groups.num_pages
        which = np.repeat(np.arange(count), len(rows))
        ids = np.random.default_rng(7).permutation(len(which)) + 1
        return np.stack([which, np.tile(rows, count), np.tile(columns, count), ids]).astype(np.int32)

    def _step_logits(self, batch: Batch) -> torch.Tensor:
        """One line for each token of the step, prefill first."""
        if batch.step.decisions.graph_size and self._graphs is not None and self._graphs.outputs is not None:
            return self._graphs.outputs.logits[: batch.step.num_sampled]
        if self._tap.hidden is None:
            raise RuntimeError("the step computed no hidden states")
        return torch.cat([self._model.logits(slab) for slab in self._tap.hidden.split(_SLAB)])

    def _force(self, rows: list[int], lengths: np.ndarray) -> None:
        """Writes the known tokens over those that were sampled; behind a sequence's end anything will do."""
        known = [(*self._sequences.tokens[row], 0)[lengths[row]] for row in rows]
        columns = [rows, [int(lengths[row]) for row in rows], known]
        self._table.write_tokens(*torch.tensor(columns, dtype=torch.int32, device=self.device))


class _TappedModel:
    """The model, remembering the hidden states of all tokens of the last step that ran without a graph."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.hidden: torch.Tensor | None = None  # [num_tokens, hidden_size]

    def forward(self, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        self.hidden = self._model(tokens, replace(ctx, logits_indices=None))
        return self.hidden if ctx.logits_indices is None else self.hidden[ctx.logits_indices]

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        self._model.bind_attention(spec, pool)

    def bind_states(self, states: StatePool) -> None:
        self._model.bind_states(states)

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        self._model.prepare(batch_sizes, longest)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.scores(hidden)

    def logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self._model.logits(hidden, slots)

    def decode_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self._model.decode_logits(hidden, slots)

    def parameters(self) -> Iterable[torch.Tensor]:
        return self._model.parameters()


class _TappedGraphs(GraphRunner):
    """Another graph runner, remembering what its last replay left behind."""

    def __init__(self, inner: GraphRunner) -> None:
        super().__init__(inner.sizes)
        self._inner = inner
        self.outputs: DecodeOutputs | None = None

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        self._inner.capture(steps, builder, attention)

    def plan_replay(self, decode: DecodeInputs) -> None:
        self._inner.plan_replay(decode)

    def replay(self, size: int, *, has_drafts: bool = False) -> DecodeOutputs:
        self.outputs = self._inner.replay(size)
        return self.outputs

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        self._inner.replay_sampling(size, sampling_graph)


def _graphs(attention: AttentionPair, device: torch.device, max_running: int) -> GraphRunner | None:
    """As `runner.build` decides: on a GPU, for every backend that runs under graphs."""
    if device.type != "cuda" or not attention.supports_graphs:
        return None
    return CudaGraphRunner(graph_sizes(max_running))
