"""A toy that observes, without layers of its own: it notes what the model would say greedily behind each token, and
proposes what it noted where the last token stood before."""

from __future__ import annotations

import torch

from minisgl_backend.layers.context import AuxStates
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.step_tensors import StepTensors


class ObservingProposer(DeviceProposer):
    """The longer a text repeats itself, the better."""

    def __init__(self, context: ProposerContext) -> None:
        super().__init__()
        self._table, self._model = context.rows.table, context.target
        self._config = context.target.config  # type: ignore[attr-defined]
        self._noted = torch.zeros_like(context.rows.table.tokens)  # by row and position

    def aux_states(self, num_tokens: int) -> AuxStates:
        out = torch.zeros(num_tokens, self._config.hidden_size, device=self._table.device)
        return AuxStates(layers=(self._config.num_layers,), out=out)  # behind the final norm

    def observe(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        self._noted[rows, positions] = self._model.logits(states).argmax(dim=-1).to(torch.int32)

    def propose(self, step: StepTensors) -> torch.Tensor:
        assert step.decode is not None, "it has nothing to catch up with"
        count = step.plan.num_proposing
        rows, lengths = step.decode.rows[:count], step.decode.kv_lens[:count]
        last, tokens = self._table.tokens[rows, lengths - 1], self._table.tokens[rows]
        is_known = torch.arange(tokens.shape[1], device=tokens.device) < (lengths - 1)[:, None]
        proposed = []
        for _ in range(step.plan.num_proposed):
            found = ((tokens == last[:, None]) & is_known).to(torch.int32).cumsum(dim=1).argmax(dim=1)
            last = self._noted[rows, found]
            proposed.append(last)
        return torch.stack(proposed)
