"""Piecewise CUDA graphs of forward passes with a prompt part: everything between two attention calls, or other eager
pieces, is one graph.

Such a pass has some ten launches per layer, and the shorter it is, the more it waits for the host. Attention stays
outside the graphs, since its shapes differ in every step. Everything else only depends on the number of tokens, which
is padded to one of a few sizes. vLLM and SGLang let a compiler split the graph; here, as in SGLang's breakable graphs,
the model's own forward pass runs once for each size, and its context ends one graph and begins the next at each piece.

A single prompt does have a fixed shape; without other requests, its pass decides the time to first token. Where the
attention backend can (`plan_prompt`), these passes are also captured whole: a small model computes a prompt of 1,000
tokens in less time than the host takes to launch its pieces. Their inputs are where the upload of a step puts them
(`graphs.single_prompt`), and the only output is the hidden state of the last token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from minisgl_backend.attention.base import PROMPT_GRAPH_CONTEXT
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.attention.pass_attention import EagerPiece, PassAttention
from minisgl_backend.layers.context import AuxStates, ForwardContext
from minisgl_backend.layers.model_input import ModelInput, Rotation
from minisgl_backend.process.progress import Progress
from minisgl_backend.runner.graphs.boundary import AttentionPiece, Boundary, Crossing
from minisgl_backend.runner.graphs.capture import captured, end_failed, many_captures
from minisgl_backend.runner.graphs.image_inputs import MOST_TOKENS, ImageInputs
from minisgl_backend.runner.graphs.single_prompt import PromptTensors

Forward = Callable[[ModelInput, ForwardContext], torch.Tensor]  # as `models.decoder.CausalLM.forward`
Between = Callable[[Crossing], None]  # called between two graphs
AuxStatesOf = Callable[[int], AuxStates | None]  # number of tokens -> additional outputs of a pass
PromptInputs = Callable[[int], PromptTensors]  # size of a pass -> its inputs, filled for a capture

# Up to this there is a size for every number of full GEMM tiles; above, each size would cost a start tens of
# milliseconds, so sizes are few, and the planner aims at them.
MOST_FINE_TOKENS = 2048
MOST_PADDING = 1 / 8  # of longer steps: those that would need more padding are launched kernel by kernel


def no_aux_states(num_tokens: int) -> AuxStates | None:
    """No additional outputs."""
    return None


@dataclass(frozen=True)
class _BoundedAttention(PassAttention):
    pair: AttentionPair
    boundary: Boundary
    overwrites = True


@dataclass(frozen=True)
class PiecewiseAttention(_BoundedAttention):
    """Copies a piece's input to a static buffer, and returns its output from another."""

    between: Between

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        return self.run(AttentionPiece(layer, self.pair), q)

    def run(self, piece: EagerPiece, x: torch.Tensor, slots: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        crossing = self.boundary.crossing(piece, x)
        # Copied, since each layer's projection has its own memory, which would otherwise have to stay allocated.
        crossing.x.copy_(x)
        self.between(crossing)
        return crossing.out


@dataclass(frozen=True)
class SinglePromptAttention(_BoundedAttention):
    """Attends into static buffers, whose padding rows keep their values."""

    plan: PairPlan

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        attended = self.boundary.crossing(AttentionPiece(layer, self.pair), q).out
        self.pair.attend_into(layer, q, self.plan, attended)
        return attended


@dataclass(frozen=True)
class _Pieces:
    """A captured pass: each of `crossings` is between two of `graphs`."""

    graphs: list[torch.cuda.CUDAGraph]
    crossings: list[Crossing]


class PiecewiseRunner(ABC):
    """Passes of up to `sizes[-1]` tokens, padded to the next of `sizes` (ascending) with tokens on the padding page."""

    prompt_sizes: tuple[int, ...] = ()  # those that are also captured whole for single prompts, ascending

    def __init__(self, sizes: tuple[int, ...], hidden_size: int, on_progress: Progress | None = None) -> None:
        self.sizes = sizes
        self._hidden_size = hidden_size
        self._on_progress = on_progress or (lambda done, total: None)
        self._turned = False  # see `capture`
        self._images: ImageInputs | None = None

    def capture(
        self,
        forward: Forward,
        attention: AttentionPair,
        prompt_inputs: PromptInputs,
        aux_states: AuxStatesOf = no_aux_states,
        *,
        turned: bool = False,
        images: ImageInputs | None = None,
    ) -> None:
        """Captures all sizes; called once, before anything runs. The largest comes first: the others reuse its memory.
        turned: the rotation may have tokens elsewhere than at their positions, behind images; images: sizes up to
        `image_inputs.MOST_TOKENS` are captured with what these have, too.
        The outputs that `aux_states` requests are left in `aux`."""
        spec = attention.spec
        self._forward, self._attention, self._prompt_inputs = forward, attention, prompt_inputs
        self._turned, self._images = turned, images
        # ids, positions, slots by cache group, and where the rotation has them
        shape = (2 + len(spec.cache_groups) + turned, self.sizes[-1])
        self._inputs = torch.zeros(shape, dtype=torch.int32, device=spec.device)
        self._boundary = Boundary(self.sizes[-1])
        self._hidden = torch.zeros(self.sizes[-1], self._hidden_size, dtype=spec.dtype, device=spec.device)
        self._last = torch.zeros(1, self._hidden_size, dtype=spec.dtype, device=spec.device)
        self.aux = aux_states(self.sizes[-1])
        with self._captures():
            for done, size in enumerate(reversed(self.sizes)):
                self._capture(size)
                if images is not None and size <= MOST_TOKENS:
                    self._capture(size, seeing=True)
                self._on_progress(done + 1, len(self.sizes))
        self.prompt_sizes = tuple(size for size in self.sizes if self._captures_prompt(size))

    @property
    def sparse_sizes(self) -> tuple[int, ...]:
        """Sizes from MOST_FINE_TOKENS on, if there are any above: the planner aims at them for long steps."""
        return tuple(size for size in self.sizes if size >= MOST_FINE_TOKENS < self.sizes[-1])

    def serves(self, tokens: ModelInput) -> bool:
        """Whether `run` takes them: a captured pass has no place for more than ids and positions, also of the rotation
        where the model's may differ, and some have places for images."""
        if tokens.rotation is not None and not self._turned:
            return False
        is_served = tokens.is_plain or (self._images is not None and self._images.serves(tokens))
        return is_served and self._size(tokens) > 0

    def run(self, tokens: ModelInput, slots: tuple[torch.Tensor, ...], plan: PairPlan) -> torch.Tensor:
        """Tokens that are served, and their slots by cache group, int32 [num_tokens] each -> hidden states [num_tokens,
        hidden_size].

        The next run overwrites them. `plan`: attention's plan for these tokens.
        """
        num_tokens = len(tokens.token_ids)
        size = self._size(tokens)
        rows = [tokens.token_ids, tokens.positions, *slots]
        if self._turned:
            rows.append(tokens.positions if tokens.rotation is None else tokens.rotation.positions)
        seeing = tokens.given is not None
        if seeing and self._images is not None:
            self._images.fill(tokens, size)
        torch.stack(rows, out=self._inputs[:, :num_tokens])
        self._inputs[:, num_tokens:size].zero_()  # slot 0 is on the padding page; an earlier step's may be in use
        self._boundary.clear_outputs(num_tokens, size)  # NaN there would reach the padding page
        buffers = self._boundary.first(num_tokens)  # the others are padding

        def run_piece(crossing: Crossing) -> None:
            x, out = buffers[crossing.pair]
            crossing.piece.run_into(x, slots, plan, out)

        self._replay(size, run_piece, seeing=seeing)
        return self._hidden[:num_tokens]

    def _size(self, tokens: ModelInput) -> int:
        """Of the pass that they are padded to; 0: there is none."""
        size = piece_size(len(tokens.token_ids), self.sizes)
        return size if tokens.given is None or size <= MOST_TOKENS else 0

    @abstractmethod
    def run_prompt(self, size: int) -> torch.Tensor:
        """Runs the pass of a single prompt, one of `prompt_sizes`, on its uploaded inputs. Returns the hidden state of
        its last token, [1, hidden_size], which the next run overwrites."""

    def close(self) -> None:  # noqa: B027  not every runner has something to free
        """Frees the captured graphs; nothing can be run afterwards."""

    def _captures(self) -> AbstractContextManager[None]:
        """Around all of them."""
        return nullcontext()

    @abstractmethod
    def _capture(self, size: int, *, seeing: bool = False) -> None:
        """Makes one size ready, of tokens with images or without."""

    @abstractmethod
    def _replay(self, size: int, between: Between, *, seeing: bool = False) -> None:
        """Runs the pass of one size, and what is between its graphs."""

    def _captures_prompt(self, size: int) -> bool:
        """Whether passes of this size are also captured whole; asked after the first pass."""
        can_be_inside = self._attention.supports_prompt_graphs and self._boundary.only_attention
        return can_be_inside and size <= PROMPT_GRAPH_CONTEXT

    def _prompt_pass(self, inputs: PromptTensors, is_warm_up: bool = False) -> None:
        """The model's own forward pass over a single prompt; the last token's hidden state goes to a static buffer."""
        size = len(inputs.token_ids)
        self._boundary.clear_outputs(0, size)  # NaN in the rows of padding would reach the padding page
        plan = self._attention.plan_prompt(inputs.attention)
        context = ForwardContext(
            slots=inputs.slots,
            attention=SinglePromptAttention(self._attention, self._boundary, plan),
            logits_indices=inputs.last_index,
            is_warm_up=is_warm_up,
            captured=True,
            aux=self._aux_of(size),
        )
        self._last.copy_(self._forward(ModelInput(inputs.token_ids, inputs.positions), context))

    def _pass(self, size: int, between: Between, *, is_warm_up: bool = False, seeing: bool = False) -> None:
        """The model's own forward pass, from static buffers into a static buffer."""
        token_ids, positions, *slots = self._inputs[:, :size]
        rotation, given = Rotation(slots.pop()) if self._turned else None, None
        if seeing and self._images is not None:
            rotation, given = self._images.rotation(size) or rotation, self._images.given(size)
        context = ForwardContext(
            slots=tuple(slots),
            attention=PiecewiseAttention(self._attention, self._boundary, between),
            is_warm_up=is_warm_up,
            captured=True,
            aux=self._aux_of(size),
        )
        self._hidden[:size].copy_(self._forward(ModelInput(token_ids, positions, rotation, given), context))

    def _aux_of(self, size: int) -> AuxStates | None:
        return None if self.aux is None else replace(self.aux, out=self.aux.out[:size])


class PiecewiseCudaGraph(PiecewiseRunner):
    """CUDA graphs. All share one memory pool: they always run one after the other, on one stream."""

    def __init__(self, sizes: tuple[int, ...], hidden_size: int, on_progress: Progress | None = None) -> None:
        super().__init__(sizes, hidden_size, on_progress)
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._captured: dict[tuple[int, bool], _Pieces] = {}  # by size, and whether with images
        self._prompts: dict[int, torch.cuda.CUDAGraph] = {}  # by size of `prompt_sizes`

    def _captures(self) -> AbstractContextManager[None]:
        return many_captures()

    def _capture(self, size: int, *, seeing: bool = False) -> None:
        # The inputs are filled on this stream, in uninitialised memory.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries choose kernels, not under capture.
            self._pass(size, lambda crossing: None, is_warm_up=True, seeing=seeing)
            self._stream.synchronize()
            with self._pieces() as (pieces, cut):
                self._pass(size, cut, seeing=seeing)
            if not seeing and self._captures_prompt(size):
                inputs = self._prompt_inputs(size)
                if not self._prompts:  # the other sizes use the same kernels, or those of the pieces above
                    self._prompt_pass(inputs, is_warm_up=True)
                self._stream.synchronize()
                with captured(self._memory) as whole:
                    self._prompt_pass(inputs)
                self._prompts[size] = whole
        self._captured[size, seeing] = pieces
        torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _pieces(self) -> Iterator[tuple[_Pieces, Between]]:
        """Captures what runs inside, split into graphs at each call of the function it yields."""
        pieces = _Pieces([torch.cuda.CUDAGraph()], [])
        graphs = pieces.graphs

        def cut(crossing: Crossing) -> None:
            graphs[-1].capture_end()
            pieces.crossings.append(crossing)
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._memory)

        graphs[-1].capture_begin(pool=self._memory)
        try:
            yield pieces, cut
        except BaseException:
            end_failed(graphs[-1])
            raise
        graphs[-1].capture_end()

    def _replay(self, size: int, between: Between, *, seeing: bool = False) -> None:
        graphs, crossings = self._captured[size, seeing].graphs, self._captured[size, seeing].crossings
        for graph, crossing in zip(graphs, crossings, strict=False):
            graph.replay()
            between(crossing)
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

    def _capture(self, size: int, *, seeing: bool = False) -> None:
        self._pass(size, lambda crossing: None, is_warm_up=True, seeing=seeing)
        if not seeing and self._captures_prompt(size):
            self._prompts[size] = self._prompt_inputs(size)

    def _replay(self, size: int, between: Between, *, seeing: bool = False) -> None:
        self._pass(size, between, seeing=seeing)

    def run_prompt(self, size: int) -> torch.Tensor:
        self._prompt_pass(self._prompts[size])
        return self._last


def piece_size(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds num_tokens; 0 where there is none, or it would have too much padding."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes):
        return 0
    padding = sizes[index] - num_tokens
    return sizes[index] if num_tokens <= MOST_FINE_TOKENS or padding <= MOST_PADDING * num_tokens else 0


def piece_sizes(largest: int) -> tuple[int, ...]:
    """Every 16 up to 64, 32 up to 128, 64 up to 512, 128 up to 2,048, 512 up to 4,096, then every 1,024, and `largest`.

    GEMMs compute 64 or 128 rows at a time, so finer sizes would save nothing. Sizes up to MOST_FINE_TOKENS must not be
    coarser either: the planner fills whole tiles of 128 tokens, and padding beyond them would be wasted work.
    """
    fine = (*range(16, 64, 16), *range(64, 128, 32), *range(128, 512, 64), *range(512, MOST_FINE_TOKENS, 128))
    sparse = (*range(MOST_FINE_TOKENS, 4096, 512), *range(4096, largest, 1024))
    sizes = [size for size in (*fine, *sparse) if size < largest]
    return (*sizes, largest) if largest > 0 else ()
