"""The residual stream between layers, including sublayer outputs that are not added yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from minisgl_backend.layers.norm import Norm, RMSNorm, SublayerNorms
from minisgl_backend.tensor_parallel import AllReduce, TensorParallel

if TYPE_CHECKING:
    from minisgl_backend.kernels.collectives.copy_engines import Sent
    from minisgl_backend.weights.method import LinearMethod


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of some tokens, [num_tokens, hidden_size]. Made by `Residual(hidden, tp)`.

    The output of the last sublayer (attention or MLP) may not be added yet, which saves a kernel. It is "settled" when
    nothing is left to add. Otherwise one of these holds, which only the methods here know:

    - Each rank has a partial sum, and the next norm fuses the all-reduce; many rows are sent to the other ranks before.
    - It is being all-reduced in place, either separately or already added to the residual stream.
    - It is normed or scaled before it is added (`SublayerNorms`).
    - Its o_proj GEMM is deferred: a mixture of experts runs it in parallel with its router.
    """

    _hidden: torch.Tensor
    _tp: TensorParallel
    _all_reduce: AllReduce = AllReduce.NCCL  # for sublayers' outputs, at this number of tokens
    # A field of each token, [num_tokens, ...], which sublayers may read; it is selected, split and joined like the
    # hidden states, so that it is always that of the rows at hand. None: there is none.
    by_row: torch.Tensor | None = None
    _output: torch.Tensor | None = None
    _norms: SublayerNorms | None = None  # applied to the output; None: it is added unchanged
    _sent: Sent | None = None
    _wait: Callable[[], object] | None = None
    _deferred: tuple[torch.Tensor, LinearMethod] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._hidden)

    def settled(self, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        """The settled residual stream, and its norm (None: its hidden states), [num_tokens, hidden_size]."""
        if norm is None or self._output is None or self._norms is not None:
            residual = self._added()
            return residual, residual._hidden if norm is None else norm(residual._hidden)
        hidden, x = self._tp.sum_norm(self._output, self._hidden, norm.weight, norm.eps, self._sent)
        residual = self.become(hidden)
        return residual, x if isinstance(norm, RMSNorm) else norm(hidden)

    def whole(self, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        """The settled residual stream, and its hidden states, [num_tokens, hidden_size], which later sublayers may
        overwrite. `norm`: the next one, which does the all-reduce where nothing else does."""
        if self._output is not None and self._norms is None:
            residual, _ = self.settled(norm)
        else:
            residual = self._added()
        return residual, residual._hidden

    def before_gemm(self, norm: Norm | None) -> tuple[Residual, torch.Tensor, RMSNorm | None]:
        """`settled`, for a GEMM that can apply an RMSNorm itself: the third result is the norm left to apply."""
        is_summed_by_norm = self._output is not None and self._norms is None
        if norm is None or (isinstance(norm, RMSNorm) and not is_summed_by_norm):
            residual = self._added()
            return residual, residual._hidden, norm
        residual, x = self.settled(norm)
        return residual, x, None

    def plus(self, output: Callable[[torch.Tensor | None], torch.Tensor], norms: SublayerNorms) -> Residual:
        """This settled residual stream plus a sublayer's output, summed over the ranks.

        `output(residual)` computes this rank's partial sum, [num_tokens, hidden_size], added to `residual` if given.
        """
        hidden, tp = self._hidden, self._tp
        if not norms.adds_as_is:
            out = output(None)
            wait = tp.begin_all_reduce(out) if tp.size > 1 else None
            return Residual(hidden, tp, self._all_reduce, self.by_row, out, norms, _wait=wait)
        if tp.size == 1:
            return self.become(output(hidden))
        if self._all_reduce is not AllReduce.NCCL:
            part = output(None)
            sent = tp.send_ahead(part, self._all_reduce)
            return Residual(hidden, tp, self._all_reduce, self.by_row, part, _sent=sent)
        out = output(hidden if tp.rank == 0 else None)  # the hidden states must enter the sum once
        return Residual(out, tp, self._all_reduce, self.by_row, _wait=tp.begin_all_reduce(out))

    def deferring(self, x: torch.Tensor, o_proj: LinearMethod) -> Residual:
        """This settled residual stream plus a GEMM of x [num_tokens, size_in] deferred to the next sublayer."""
        return Residual(self._hidden, self._tp, self._all_reduce, self.by_row, _deferred=(x, o_proj))

    @property
    def deferred_o_proj(self) -> tuple[torch.Tensor, torch.Tensor, LinearMethod] | None:
        """Hidden states, x and o_proj, if that GEMM is deferred to the caller, who passes the result to `become`."""
        return None if self._deferred is None else (self._hidden, *self._deferred)

    def become(self, hidden: torch.Tensor) -> Residual:
        """A settled residual stream of these hidden states of the same tokens."""
        return Residual(hidden, self._tp, self._all_reduce, self.by_row)

    def times(self, factor: torch.Tensor) -> Residual:
        """All hidden states multiplied by factor [1]."""
        residual, hidden = self.settled(None)
        return residual.become(hidden * factor)

    def plus_at(self, rows: torch.Tensor, vectors: torch.Tensor) -> Residual:
        """This settled residual stream plus vectors [k, hidden_size] at some tokens; rows int64 [k]."""
        return self.become(self._hidden.index_add(0, rows, vectors))

    def at(self, indices: torch.Tensor) -> Residual:
        """Some tokens of this settled residual stream; indices int [num_chosen]."""
        by_row = None if self.by_row is None else self.by_row[indices]
        return Residual(self._hidden[indices], self._tp, self._all_reduce, by_row)

    def split(self, sizes: Sequence[int]) -> MicroBatches:
        """This settled residual stream as micro-batches of these sizes."""
        fields = repeat(None) if self.by_row is None else self.by_row.split(list(sizes))
        parts = zip(self._hidden.split(list(sizes)), fields, strict=False)
        return tuple(Residual(hidden, self._tp, self._all_reduce, by_row) for hidden, by_row in parts)

    def reduced_by(self, all_reduce: AllReduce) -> Residual:
        """This settled residual stream, with `all_reduce` for the outputs of later sublayers."""
        return Residual(self._hidden, self._tp, all_reduce, self.by_row)

    def _added(self) -> Residual:
        if self._deferred is not None:
            raise RuntimeError("a deferred o_proj was not computed")
        if self._output is not None and self._norms is None:
            raise RuntimeError("a sublayer's output is summed over the ranks by the next norm, and there is none")
        if self._wait is not None:
            self._wait()
        elif self._output is None:
            return self
        hidden = self._hidden
        if self._output is not None and self._norms is not None:
            hidden = self._norms.add(hidden, self._output)
        return self.become(hidden)


# The residual stream of a long prompt passes GEMMs, norms and MLPs as two micro-batches, its first and its last tokens:
# the all-reduce of one overlaps the other's GEMMs. All other steps have one micro-batch.
MicroBatches = tuple[Residual, ...]


def join(parts: MicroBatches) -> Residual:
    """Joins settled micro-batches."""
    if len(parts) == 1:
        return parts[0]
    fields = [part.by_row for part in parts if part.by_row is not None]
    whole = replace(parts[0], by_row=torch.cat(fields) if fields else None)
    return whole.become(torch.cat([part._hidden for part in parts]))
