"""Token ids to vectors, and vectors to logits.

The embedding is replicated on every rank, which saves an all-reduce per step; the output projection is split by
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.layers.linear import AdaptedLinear
from minisgl_backend.layers.lora import AdaptedWeight
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart


class EmbeddingAdapters(AdaptedWeight):
    """The adapters of an embedding, whose inputs are tokens and whose outputs its vectors' numbers."""

    def __init__(self, embedding: Embedding, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._embedding = (embedding,)  # which is no module within this one
        output = LinearOutput(name=name, size=hidden_size, start=0, local=hidden_size)
        self._spec = LinearSpec(outputs=(output,), input_size=vocab_size, local_inputs=vocab_size)

    @property
    def lora_spec(self) -> LinearSpec:
        return self._spec

    def try_adapters(self, slots: torch.Tensor) -> None:
        self._embedding[0](slots, slots)

    def numbers(self) -> torch.Tensor:
        (embedding,) = self._embedding
        return embedding.weight.T if embedding.method is None else embedding.method.dequantized().T


class Embedding(WeightedLayer):
    """`multiplier`: of all vectors (Gemma, Granite), rounded to their dtype, as in transformers.

    `weight` [vocab_size, hidden_size], or a `method` in whose format its rows are.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, name: str, layer_context: LayerContext, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self._multiplier = torch.tensor(multiplier, dtype=layer_context.dtype).item()
        self._name = layer_context.name(name)
        output = LinearOutput(name=self._name, size=vocab_size, start=0, local=vocab_size)
        self.method = layer_context.methods.vocabulary(
            LinearSpec(outputs=(output,), input_size=hidden_size, local_inputs=hidden_size)
        )
        if self.method is None:
            self.weight = layer_context.parameter(vocab_size, hidden_size)
        self.adapters = EmbeddingAdapters(self, self._name, vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """token_ids int [num_tokens] -> [num_tokens, hidden_size]. slots: of adapters, int32 [num_tokens]; None: no
        token has one."""
        vectors = self.rows(token_ids)
        if slots is not None and (lora := self.adapters.lora) is not None:
            lora.add_rows(vectors, token_ids, slots)
        return vectors if self._multiplier == 1.0 else vectors.mul_(self._multiplier)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`forward` without the multiplier."""
        return F.embedding(token_ids, self.weight) if self.method is None else self.method.rows(token_ids)

    def weight_parts(self) -> list[WeightPart]:
        if self.method is not None:  # whose own they are
            return []
        return [WeightPart(name=f"{self._name}.weight", shape=tuple(self.weight.shape), target=self.weight)]


def _output(spec: LinearSpec, layer_context: LayerContext, tied: Embedding | None) -> LinearMethod:
    methods, (output,) = layer_context.methods, spec.outputs
    if tied is None:
        return methods.vocabulary(spec) or methods.plain_linear(spec)
    if tied.method is not None:
        return tied.method.output_rows(spec)
    return methods.plain_linear(spec, tied.weight.data[output.start : output.start + output.local])


class ParallelLMHead(AdaptedLinear):
    """Hidden states to logits. `tied` shares the embedding's weight: each rank uses its rows of it."""

    def __init__(
        self, vocab_size: int, hidden_size: int, name: str, layer_context: LayerContext, tied: Embedding | None
    ) -> None:
        super().__init__()
        self._layer_context = layer_context
        self._vocab_size = vocab_size
        self._rows_per_rank = -(-vocab_size // layer_context.tp.size)  # the last rank's share may be smaller
        self._start = min(layer_context.tp.rank * self._rows_per_rank, vocab_size)
        rows = min(self._rows_per_rank, vocab_size - self._start)
        output = LinearOutput(name=layer_context.name(name), size=vocab_size, start=self._start, local=rows)
        spec = LinearSpec(outputs=(output,), input_size=hidden_size, local_inputs=hidden_size)
        self.method = _output(spec, layer_context, tied)

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [num_tokens, hidden_size] -> logits [num_tokens, vocab_size], on every rank. slots: of adapters, int32
        [num_tokens]; None: no token has one."""
        logits = self.method.apply_weights(hidden)
        if slots is not None and self.lora is not None:
            self.lora.add_to(logits, hidden, slots)
        tp = self._layer_context.tp
        if tp.size == 1:
            return logits
        if missing := self._rows_per_rank * tp.size - self._vocab_size:
            logits = F.pad(logits, (0, self._rows_per_rank - logits.shape[1]))
        gathered = tp.all_gather(logits)  # [size, num_tokens, rows_per_rank]
        # This copy is vectorised; a copy of a transposed tensor is not.
        whole = torch.cat(gathered.unbind(), dim=1)
        return whole[:, : self._vocab_size] if missing else whole

    def on_rank_0(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` for a decode step (see `TensorParallel.logits_columns`), where ranks other than 0 may get
        [num_tokens, 0]."""
        tp = self._layer_context.tp
        # Columns may be in another GPU's memory, where adapters' kernels do not add.
        adapted = slots is not None and self.lora is not None
        columns = None if adapted else tp.logits_columns(len(hidden), self._start, self.method.spec.shape[0])
        if columns is None:
            return self(hidden, slots)
        if columns.shape[1]:
            self.method.apply_into(hidden, columns)
        return tp.collect_logits(len(hidden))
