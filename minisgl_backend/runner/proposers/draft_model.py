"""Draft model: a smaller model with the target's vocabulary, which proposes the tokens that it would sample.

(Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".)

It samples its own logits with the row's temperature and the noise of the position, as the target will: the better the
two agree, the more of its tokens the target samples, too, at any temperature. Penalties, truncation and grammars are
left to the target.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import PairPlan
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import build_model
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.json_files import read_json_if_there
from minisgl_backend.runner.batch import graph_size
from minisgl_backend.runner.graphs.whole import DecodeOutputs, DecodeSteps
from minisgl_backend.runner.model_pass import ModelPass
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.proposers.model_proposer import ModelProposer
from minisgl_backend.runner.staging import aligned
from minisgl_backend.runner.step_tensors import StepTensors


class DraftModelProposer(ModelProposer):
    """A step is a pass over the proposing rows' last tokens and all tokens that it has not seen, then one pass for each
    further token. Passes that only decode are captured."""

    def __init__(self, context: ProposerContext) -> None:
        draft = context.draft
        self._model = build_model(draft.model, draft.model_dir, context.load)
        super().__init__(context, self._model)
        self._pass = ModelPass(self._model, self._attention, self._table)
        self._last_token = draft.model.vocab_size - 1

    @classmethod
    def read_draft_model(cls, config: EngineConfig, folder: Path, target: ModelConfig, target_dir: Path) -> ModelConfig:
        model = load_model_config(folder, "native")
        _check_vocabulary(folder, model, target, target_dir)
        if model.ends_with_pages:
            raise ConfigError(
                f"some layers of {model.architecture} (convolutions or the gated delta rule) keep a state that goes on "
                "page by page, and a draft model's passes begin anywhere; allowed: a model whose layers all attend, or "
                "another method: ngram, or mtp where the target has such a layer"
            )
        return model

    def _passes(self) -> DecodeSteps:
        return DecodeSteps(self._decode, partial(self._decode, is_warm_up=True), None)

    def propose(self, step: StepTensors) -> torch.Tensor:
        plan, decode, count = step.plan, step.decode, step.plan.num_proposing
        if decode is None:  # no row has caught up
            self._see(step, None)
            return torch.empty(plan.num_proposed, 0, dtype=torch.int32, device=self._table.device)
        rows, lengths = decode.rows[:count], decode.kv_lens[:count]
        # Each row is aligned to 16 bytes: see staging.ALIGNMENT.
        proposed = torch.empty(plan.num_proposed, aligned(count), dtype=torch.int32, device=self._table.device)
        rows_host, lengths_host = plan.decode_rows[:count], plan.decode_lengths[:count]
        for position in range(plan.num_proposed):
            if position == 0:
                token_ids = self._first_pass(step, decode)
            else:
                if position == 1:
                    self._builder.pad(count)
                lengths.add_(1)
                token_ids = self._next_pass(rows_host, lengths_host + np.int32(position))
            # NaN logits may give any token id; the target's embedding only has rows for its vocabulary.
            tokens = torch.clamp(token_ids[0, :count], 0, self._last_token, out=proposed[position, :count])
            self._table.write_tokens(rows, lengths, tokens)
        return proposed

    def _first_pass(self, step: StepTensors, decode: DecodeInputs) -> torch.Tensor:
        """The tokens after the rows' last ones, int32 [2, num_proposing or more]."""
        if step.decisions.graph_size:
            return self._replay(decode)
        hidden, count = self._see(step, decode), step.plan.num_proposing
        return self._sample(self._model.logits(hidden), decode.rows[:count], decode.kv_lens[:count])

    def _see(self, step: StepTensors, decode: DecodeInputs | None) -> torch.Tensor:
        """A pass over all tokens of a step. Returns the hidden states of the proposing rows, [num_proposing,
        hidden_size], or of any token where there are none."""
        plan = self._attention.plan(step.prefill, decode)
        rows, positions = step.tokens()
        first, count = plan.num_prefill_tokens, step.plan.num_proposing
        if count == len(rows):
            return self._pass(rows, positions, plan)
        first, count = (first, count) if count else (0, 1)
        indices = torch.arange(first, first + count, dtype=torch.int32, device=self._table.device)
        return self._pass(rows, positions, plan, logits_indices=indices)

    def _next_pass(self, rows: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """The next tokens of these rows; rows and lengths int32 [num_rows] as in the staging buffer."""
        size = graph_size(len(rows), self.graph_sizes)
        if size:
            return self._replay(self._builder.padded_inputs(rows, lengths, size))
        decode = self._builder.decode_inputs(rows, lengths)
        return self._decode(decode, self._attention.plan(None, decode), captured=False).token_ids

    def _replay(self, decode: DecodeInputs) -> torch.Tensor:
        assert self._graphs is not None, "its sizes come from it"
        self._graphs.plan_replay(decode)
        return self._graphs.replay(decode.batch_size, has_drafts=decode.has_drafts).token_ids

    def _decode(
        self, decode: DecodeInputs, plan: PairPlan, is_warm_up: bool = False, captured: bool = True
    ) -> DecodeOutputs:
        """One pass that only decodes, as captured: from the token table to tokens."""
        hidden = self._pass(decode.rows, decode.kv_lens - 1, plan, is_warm_up=is_warm_up, captured=captured)
        logits = self._model.decode_logits(hidden) if captured else self._model.logits(hidden)
        return DecodeOutputs(logits, self._sample(logits, decode.rows, decode.kv_lens))


def _check_vocabulary(folder: Path, model: ModelConfig, target: ModelConfig, target_dir: Path) -> None:
    """Raises ConfigError unless its tokens are the target's."""
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"it has a vocabulary of {model.vocab_size} tokens and the target one of {target.vocab_size}; allowed: "
            "a model with the same tokenizer and vocabulary"
        )
    if folder == target_dir:
        return
    own, others = _tokens(folder), _tokens(target_dir)
    if own is None or others is None or own == others:
        return
    token = min((token for token in own.keys() | others.keys() if own.get(token) != others.get(token)), key=str)
    raise ConfigError(
        f"it has another tokenizer than the target: {token!r} is token {own.get(token)} of it and "
        f"{others.get(token)} of the target; allowed: a model with the same tokenizer and vocabulary"
    )


def _tokens(folder: Path) -> dict[str, Any] | None:
    """Ids by token from tokenizer.json; None where it has no vocabulary."""
    tokenizer = read_json_if_there(folder / "tokenizer.json")
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    return {**vocabulary, **{one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}}
