"""Forward passes with a prompt part, captured in pieces: all that lies between two attentions is one CUDA graph.

Such a pass is some ten launches a layer, and the shorter it is the more it waits for the host. Attention stays outside
of the graphs: its shape is another one in every step. Everything else depends on the number of tokens alone, which is
padded to one of a few sizes. vLLM and SGLang call it piecewise graphs and let a compiler cut; here, as in SGLang's
breakable graphs, the model's own forward pass runs once for each size, and its context, asked to attend, ends one graph
and begins the next.

One case has a shape: a lone prompt, which is what a first token waits for where no other request is served. Where the
attention backend can (`plan_prompt`), such passes are captured once more, whole: a small model's prompt of 1,000 tokens
is computed in less time than the host takes to launch its pieces. Their inputs are where the upload of a step puts them
(`graphs.single_prompt`), and only the last token's hidden states come out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from minisgl_backend.attention.base import PROMPT_GRAPH_CONTEXT
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.layers.context import AuxStates, ForwardContext
from minisgl_backend.process.progress import Progress
from minisgl_backend.runner.graphs.capture import captured, end_failed, many_captures
from minisgl_backend.runner.graphs.single_prompt import PromptTensors

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]  # that of models.decoder.CausalLM
AtAttention = Callable[[AttentionLayer], None]  # what to do between two pieces
AuxStatesOf = Callable[[int], AuxStates | None]  # by number of tokens: what a pass leaves besides its result
PromptInputs = Callable[[int], PromptTensors]  # by the size of a pass: what it reads, filled for a capture

# Up to here there is a size for every step that fills the tiles of a GEMM; above, each would cost a start tens of
# milliseconds, so sizes are few, and the planner aims at them.
MOST_FINE_TOKENS = 2048
MOST_PADDING = 1 / 8  # of a longer step: padded by more it is launched kernel by kernel


def no_aux_states(num_tokens: int) -> AuxStates | None:
    """Passes are asked for nothing more."""
    return None


@dataclass(frozen=True, kw_only=True)
class PiecewiseContext(ForwardContext):
    """Leaves the queries of a layer in one static buffer and takes what was attended from another."""

    queries: torch.Tensor  # [num_tokens, num_q_heads, q_head_dim]
    attended: torch.Tensor  # [num_tokens, num_q_heads, v_head_dim]
    at_attention: AtAttention
    captured: bool = True

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        # Copied, since the projection's memory is another one in each layer, and would have to live on in all of them.
        self.queries.copy_(q)
        self.at_attention(layer)
        return self.attended


@dataclass(frozen=True, kw_only=True)
class SinglePromptContext(ForwardContext):
    """Attends into one static buffer, so that the rows of padding keep what they had."""

    attended: torch.Tensor  # [num_tokens, num_q_heads, v_head_dim]
    attention: AttentionPair
    plan: PairPlan
    captured: bool = True

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        self.attention.attend_into(layer, q, self.plan, self.attended)
        return self.attended


@dataclass(frozen=True)
class _Pieces:
    """A pass as it was captured: each of `layers` attends between two of `graphs`."""

    graphs: list[torch.cuda.CUDAGraph]
    layers: list[AttentionLayer]


class PiecewiseRunner(ABC):
    """Passes of up to `sizes[-1]` tokens, padded to the next of `sizes` (ascending) with tokens on the padding page."""

    prompt_sizes: tuple[int, ...] = ()  # those whose passes are there for lone prompts too, ascending

    def __init__(self, sizes: tuple[int, ...], hidden_size: int, on_progress: Progress | None = None) -> None:
        self.sizes = sizes
        self._hidden_size = hidden_size
        self._on_progress = on_progress or (lambda done, total: None)

    def capture(
        self,
        forward: Forward,
        attention: AttentionPair,
        prompt_inputs: PromptInputs,
        aux_states: AuxStatesOf = no_aux_states,
    ) -> None:
        """Makes all sizes ready; called once, before anything runs. The largest comes first: the others fit into it.
        What `aux_states` asks for, they leave in `aux`."""
        spec = attention.spec
        group = spec.groups[0]  # the layers of one model differ in windows, not in heads: one buffer serves all
        heads = (self.sizes[-1], group.num_q_heads)
        self._forward, self._attention, self._prompt_inputs = forward, attention, prompt_inputs
        shape = (2 + len(spec.cache_windows), self.sizes[-1])  # ids, positions, slots by cache group
        self._inputs = torch.zeros(shape, dtype=torch.int32, device=spec.device)
        self._queries = torch.zeros((*heads, group.q_head_dim), dtype=spec.dtype, device=spec.device)
        self._attended = torch.zeros((*heads, group.v_head_dim), dtype=spec.dtype, device=spec.device)
        self._hidden = torch.zeros(self.sizes[-1], self._hidden_size, dtype=spec.dtype, device=spec.device)
        self._last = torch.zeros(1, self._hidden_size, dtype=spec.dtype, device=spec.device)
        self.aux = aux_states(self.sizes[-1])
        if attention.supports_prompt_graphs:
            self.prompt_sizes = tuple(size for size in self.sizes if size <= PROMPT_GRAPH_CONTEXT)
        for done, size in enumerate(reversed(self.sizes)):
            self._capture(size)
            self._on_progress(done + 1, len(self.sizes))

    @property
    def sparse_sizes(self) -> tuple[int, ...]:
        """Those from MOST_FINE_TOKENS on, if there are any above: what is to be filled by who plans a long step."""
        return tuple(size for size in self.sizes if size >= MOST_FINE_TOKENS < self.sizes[-1])

    def fits(self, num_tokens: int) -> bool:
        return piece_size(num_tokens, self.sizes) > 0

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: PairPlan
    ) -> torch.Tensor:
        """Token ids, positions and slots by cache group, int32 [num_tokens] each -> hidden states [num_tokens,
        hidden_size].

        These are overwritten by the next run. `plan` is that of attention for these tokens.
        """
        num_tokens = len(token_ids)
        size = piece_size(num_tokens, self.sizes)
        torch.stack([token_ids, positions, *slots], out=self._inputs[:, :num_tokens])
        self._inputs[:, num_tokens:size].zero_()  # slot 0 is on the padding page; of an earlier step it would be taken
        self._attended[num_tokens:size].zero_()  # NaN there would reach the padding page
        queries, attended = self._queries[:num_tokens], self._attended[:num_tokens]

        def attend(layer: AttentionLayer) -> None:
            self._attention.attend_into(layer, queries, plan, attended)

        self._replay(size, attend)
        return self._hidden[:num_tokens]

    @abstractmethod
    def run_prompt(self, size: int) -> torch.Tensor:
        """The pass of a lone prompt, of one of `prompt_sizes`, on what its inputs hold: the hidden states of its last
        token, [1, hidden_size], which are overwritten by the next one."""

    def close(self) -> None:  # noqa: B027  not every runner has something to free
        """Frees what was captured; nothing can be run afterwards."""

    @abstractmethod
    def _capture(self, size: int) -> None:
        """Makes one size ready."""

    @abstractmethod
    def _replay(self, size: int, at_attention: AtAttention) -> None:
        """Runs the pass of one size, and attention between its pieces."""

    def _prompt_pass(self, inputs: PromptTensors, rehearses: bool = False) -> None:
        """The model's own forward pass over a lone prompt, its last token's hidden states into a static buffer."""
        attended = self._attended[: len(inputs.token_ids)]
        attended.zero_()  # NaN in the rows of padding would reach the padding page
        context = SinglePromptContext(
            slots=inputs.slots,
            logits_indices=inputs.last_line,
            attended=attended,
            attention=self._attention,
            plan=self._attention.plan_prompt(inputs.attention),
            rehearses=rehearses,
            aux=self._aux_of(len(inputs.token_ids)),
        )
        self._last.copy_(self._forward(inputs.token_ids, inputs.positions, context))

    def _pass(self, size: int, at_attention: AtAttention, rehearses: bool = False) -> None:
        """The model's own forward pass, from static buffers into a static buffer."""
        token_ids, positions, *slots = self._inputs[:, :size]
        context = PiecewiseContext(
            slots=tuple(slots),
            queries=self._queries[:size],
            attended=self._attended[:size],
            at_attention=at_attention,
            rehearses=rehearses,
            aux=self._aux_of(size),
        )
        self._hidden[:size].copy_(self._forward(token_ids, positions, context))

    def _aux_of(self, size: int) -> AuxStates | None:
        return None if self.aux is None else replace(self.aux, out=self.aux.out[:size])


class PiecewiseCudaGraph(PiecewiseRunner):
    """The real thing. All graphs share one memory pool: they always run one after the other, on one stream."""

    def __init__(self, sizes: tuple[int, ...], hidden_size: int, on_progress: Progress | None = None) -> None:
        super().__init__(sizes, hidden_size, on_progress)
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._captured: dict[int, _Pieces] = {}
        self._prompts: dict[int, torch.cuda.CUDAGraph] = {}  # of `prompt_sizes`

    def capture(
        self,
        forward: Forward,
        attention: AttentionPair,
        prompt_inputs: PromptInputs,
        aux_states: AuxStatesOf = no_aux_states,
    ) -> None:
        with many_captures():
            super().capture(forward, attention, prompt_inputs, aux_states)

    def _capture(self, size: int) -> None:
        # The inputs are filled on this stream, in memory that may hold anything before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._pass(size, lambda layer: None, rehearses=True)  # libraries choose kernels, not under capture
            self._stream.synchronize()
            with self._pieces() as (pieces, cut):
                self._pass(size, cut)
            if size in self.prompt_sizes:
                inputs = self._prompt_inputs(size)
                if not self._prompts:  # the others take the same kernels, or those of the pieces above
                    self._prompt_pass(inputs, rehearses=True)
                self._stream.synchronize()
                with captured(self._memory) as whole:
                    self._prompt_pass(inputs)
                self._prompts[size] = whole
        self._captured[size] = pieces
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _pieces(self) -> Iterator[tuple[_Pieces, AtAttention]]:
        """Captures what runs inside, cut into graphs at each call of the function it gives."""
        pieces = _Pieces([torch.cuda.CUDAGraph()], [])
        graphs = pieces.graphs

        def cut(layer: AttentionLayer) -> None:
            graphs[-1].capture_end()
            pieces.layers.append(layer)
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._memory)

        graphs[-1].capture_begin(pool=self._memory)
        try:
            yield pieces, cut
        except BaseException:
            end_failed(graphs[-1])
            raise
        graphs[-1].capture_end()

    def _replay(self, size: int, at_attention: AtAttention) -> None:
        graphs, layers = self._captured[size].graphs, self._captured[size].layers
        for graph, layer in zip(graphs, layers, strict=False):
            graph.replay()
            at_attention(layer)
        graphs[-1].replay()

    def run_prompt(self, size: int) -> torch.Tensor:
        self._prompts[size].replay()
        return self._last

    def close(self) -> None:
        for graph in (*(one for pieces in self._captured.values() for one in pieces.graphs), *self._prompts.values()):
            graph.reset()
        self._captured.clear()
        self._prompts.clear()


class EagerPieces(PiecewiseRunner):
    """The same padding and static buffers without graphs: for tests and for devices that have none."""

    def __init__(self, sizes: tuple[int, ...], hidden_size: int, on_progress: Progress | None = None) -> None:
        super().__init__(sizes, hidden_size, on_progress)
        self._prompts: dict[int, PromptTensors] = {}

    def _capture(self, size: int) -> None:
        self._pass(size, lambda layer: None, rehearses=True)
        if size in self.prompt_sizes:
            self._prompts[size] = self._prompt_inputs(size)

    def _replay(self, size: int, at_attention: AtAttention) -> None:
        self._pass(size, at_attention)

    def run_prompt(self, size: int) -> torch.Tensor:
        self._prompt_pass(self._prompts[size])
        return self._last


def piece_size(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds num_tokens; 0 where there is none, or too much of it would be padding."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes):
        return 0
    padding = sizes[index] - num_tokens
    return sizes[index] if num_tokens <= MOST_FINE_TOKENS or padding <= MOST_PADDING * num_tokens else 0


def piece_sizes(largest: int) -> tuple[int, ...]:
    """Every 16 up to 64, 32 up to 128, 64 up to 512, 128 up to 2,048, 512 up to 4,096, then every 1,024, and `largest`.

    GEMMs compute 64 or 128 rows at a time, so that padding to less than that would save nothing. Nor may sizes
    up to MOST_FINE_TOKENS be coarser: the planner fills whole tiles of 128 tokens, and what is padded beyond them is
    computed for nothing.
    """
    fine = (*range(16, 64, 16), *range(64, 128, 32), *range(128, 512, 64), *range(512, MOST_FINE_TOKENS, 128))
    sparse = (*range(MOST_FINE_TOKENS, 4096, 512), *range(4096, largest, 1024))
    sizes = [size for size in (*fine, *sparse) if size < largest]
    return (*sizes, largest) if largest > 0 else ()
