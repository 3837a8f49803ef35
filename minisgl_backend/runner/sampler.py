"""From logits to token ids, for a whole batch at once and without a loop over its rows.

Order of operations: penalties, token rules (bias, bad words, min_tokens), grammar mask, temperature, min-p, top-k,
top-p on what top-k left, Gumbel noise, argmax. Log-probabilities are taken before all of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.runner import logprobs
from minisgl_backend.runner.gumbel import gumbel, row_keys
from minisgl_backend.runner.logits_processors import RuleTable
from minisgl_backend.runner.penalties import PenaltyCounts
from minisgl_backend.runner.row_table import MIN_P, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P, RowTable


@dataclass(frozen=True)
class SamplingInputs:
    """The rows that sample in one step and what they need, decided on the host. Index tensors are int32, on the device.

    The optional parts are None where no row of the step asks for them.
    """

    rows: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]  of the tokens to be sampled
    random: bool  # some row is not greedy
    min_p: bool  # some row uses min-p
    ranked: torch.Tensor | None = None  # [k]  lines with top-k or top-p
    ranked_width: int = 0  # most candidates any of them can have
    penalised: torch.Tensor | None = None  # [k]  lines with penalties
    penalty_lines: torch.Tensor | None = None  # [k]  their lines in PenaltyCounts
    rules: RuleTable | None = None
    masked: torch.Tensor | None = None  # [k]  lines with a grammar
    mask_bits: torch.Tensor | None = None  # [k, ceil(vocab_size / 32)]  1: allowed
    logprobs: torch.Tensor | None = None  # [k]  lines that want log-probabilities
    top_logprobs: int = 0  # most alternatives any of them wants

    @property
    def plain(self) -> bool:
        """True where temperature alone decides: such steps are sampled inside a captured graph."""
        return not self.min_p and all(
            part is None for part in (self.ranked, self.penalised, self.rules, self.masked, self.logprobs)
        )


@dataclass(frozen=True)
class Sampled:
    """What one step sampled, on the device."""

    # int32 [2, n or more]: the tokens; and 1 where the logits were sound, 0 where they were NaN or infinite.
    # What a graph sampled comes with its padding; after the tokens, the soundness of chunks that sample none.
    token_ids: torch.Tensor
    logprobs: torch.Tensor | None  # int32 [k, 3 + 2 * top], see logprobs.pack


# logits [n, vocab_size], rows int32 [n], positions int32 [n] -> int32 [2, n] like `Sampled.token_ids`
PlainSampler = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Sampler:
    """Samples from logits by the parameters in the row table."""

    def __init__(self, table: RowTable, penalties: PenaltyCounts, fused: PlainSampler | None = None) -> None:
        """`fused`, where there is one, serves the steps that temperature alone decides."""
        self._table = table
        self._penalties = penalties
        self._fused = fused

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        """logits [n, vocab_size] of any float type, left as they are -> the sampled tokens."""
        if inputs.plain and self._fused is not None:
            return Sampled(self._fused(logits, inputs.rows, inputs.positions), None)
        raw = logits
        if inputs.penalised is not None or inputs.rules is not None or inputs.masked is not None:
            logits = self._edit(logits, inputs)
        if inputs.random:
            token_ids, best = self._sample_random(logits, inputs)
        else:
            best, token_ids = torch.max(logits, dim=1)
        token_ids = token_ids.to(torch.int32)
        if inputs.penalised is not None and inputs.penalty_lines is not None:
            self._penalties.count(inputs.penalty_lines, token_ids[inputs.penalised])
        packed = None
        if inputs.logprobs is not None:
            packed = logprobs.pack(raw[inputs.logprobs], token_ids[inputs.logprobs], inputs.top_logprobs)
        return Sampled(torch.stack([token_ids, torch.isfinite(best).to(torch.int32)]), packed)

    def sample_plain(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Temperature or greedy sampling only, as it is captured in graphs; int32 [2, n] like `Sampled.token_ids`."""
        return self.sample(logits, SamplingInputs(rows=rows, positions=positions, random=True, min_p=False)).token_ids

    def _edit(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        raw, logits = logits, logits.to(torch.float32, copy=True)
        if inputs.penalised is not None and inputs.penalty_lines is not None:
            params = self._table.float_params[inputs.rows[inputs.penalised]]
            self._penalties.apply(logits, inputs.penalised, inputs.penalty_lines, params)
        if inputs.rules is not None:
            inputs.rules.apply(logits, inputs.rows, inputs.positions, self._table)
        if inputs.masked is not None and inputs.mask_bits is not None:
            apply_bitmask(logits, inputs.masked, inputs.mask_bits, raw)
        return logits

    def _sample_random(self, logits: torch.Tensor, inputs: SamplingInputs) -> tuple[torch.Tensor, torch.Tensor]:
        params = self._table.params[inputs.rows]
        floats = params.view(torch.float32)
        scaled, greedy = _scale(logits, floats[:, TEMPERATURE])
        if inputs.min_p:
            _apply_min_p(scaled, floats[:, MIN_P])
        key0, key1 = row_keys(params[:, SEED_LOW], params[:, SEED_HIGH], inputs.positions)
        ranked = inputs.ranked
        if ranked is not None and len(ranked) == len(scaled):
            return _sample_ranked(scaled, params, key0, key1, inputs.ranked_width)
        vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
        noise = gumbel(key0, key1, vocabulary).masked_fill_(greedy.unsqueeze(1), 0.0)
        best, token_ids = torch.max(noise.add_(scaled), dim=1)
        if ranked is not None:
            ranked_ids, ranked_best = _sample_ranked(
                scaled[ranked], params[ranked], key0[ranked], key1[ranked], inputs.ranked_width
            )
            token_ids[ranked], best[ranked] = ranked_ids, ranked_best
        return token_ids, best


def fused_sampler(table: RowTable, vocab_size: int) -> PlainSampler | None:
    """The kernel that samples by temperature in one pass over the logits; None where it cannot run."""
    if table.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    # Imported late: the package is missing on machines without a GPU.
    from minisgl_backend.kernels.sampling import SamplingWorkspace, sample_plain

    workspace = SamplingWorkspace(table.max_rows, vocab_size, table.device)
    columns = (TEMPERATURE, SEED_LOW, SEED_HIGH)
    pdl = torch.cuda.get_device_capability(table.device) >= (9, 0)
    return lambda logits, rows, positions: sample_plain(logits, rows, positions, table.params, columns, workspace, pdl)


def apply_bitmask(logits: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor, raw: torch.Tensor) -> None:
    """Forbids, in `lines` of logits float32 [n, vocab_size], the tokens whose bit is 0.

    Token t's bit is bit t % 32 of word t // 32, as grammar compilers write it; bits int32 [k, ceil(vocab_size / 32)].
    Where bad words or min_tokens leave nothing of what the grammar allows, the grammar wins: those lines get their
    `raw` logits back.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).view(len(bits), -1)[:, : logits.shape[1]].bool()
    chosen = logits[lines].masked_fill(~allowed, float("-inf"))
    nothing_left = chosen.amax(dim=1, keepdim=True) == float("-inf")
    fallback = raw[lines].to(torch.float32).masked_fill(~allowed, float("-inf"))
    logits[lines] = torch.where(nothing_left, fallback, chosen)


def _scale(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over temperature in float32 and which rows are greedy; those stay unscaled."""
    greedy = temperature == 0.0
    return logits.to(torch.float32) / torch.where(greedy, 1.0, temperature).unsqueeze(1), greedy


def _apply_min_p(scaled: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drops tokens less likely than min_p times the most likely one; log(0) drops none."""
    lowest = scaled.amax(dim=1) + torch.log(min_p)
    scaled.masked_fill_(scaled < lowest.unsqueeze(1), float("-inf"))


def _sample_ranked(
    scaled: torch.Tensor, params: torch.Tensor, key0: torch.Tensor, key1: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k, then top-p, then noise on the candidates alone; token ids int64 [n] and their scores [n]."""
    step = max(1, logprobs.SLAB_ELEMENTS // scaled.shape[1])
    ids, best = [], []
    for start in range(0, len(scaled), step):
        part = slice(start, start + step)
        slab_ids, slab_best = _rank_slab(scaled[part], params[part], key0[part], key1[part], width)
        ids.append(slab_ids)
        best.append(slab_best)
    return torch.cat(ids), torch.cat(best)


def _rank_slab(
    scaled: torch.Tensor, params: torch.Tensor, key0: torch.Tensor, key1: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    floats = params.view(torch.float32)
    if width < scaled.shape[1]:
        values, ids = torch.topk(scaled, width, dim=1)
    else:
        values, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    top_k = params[:, TOP_K].unsqueeze(1)
    rank = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    values = values.masked_fill((rank >= top_k) & (top_k > 0), float("-inf"))
    probabilities = torch.softmax(values, dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    top_p = floats[:, TOP_P].unsqueeze(1)
    # top_p 1 must keep everything although rounding may bring the sum to 1 early; the first candidate always stays.
    outside = (before >= top_p) & (top_p < 1.0) & (rank > 0)
    values = values.masked_fill(outside, float("-inf"))
    noise = gumbel(key0, key1, ids.to(torch.int32))
    greedy = (floats[:, TEMPERATURE] == 0.0).unsqueeze(1)
    best, winner = torch.max(noise.masked_fill_(greedy, 0.0).add_(values), dim=1)
    return ids.gather(1, winner.unsqueeze(1)).squeeze(1), best
