"""From logits to token ids, for a whole batch at once.

Order of operations: penalties, token rules (bias, bad words, min_tokens), grammar mask, temperature, min-p, top-k,
top-p on the tokens that top-k keeps, Gumbel noise, argmax. Log-probabilities are taken before all of these.

Top-k and top-p rank tokens by logit; of equal logits the lower token id ranks first. Probabilities are summed as
integers. So a row's token depends on nothing but its own logits and options, to the bit. `kernels.sampling` does the
same in Triton kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import HALF
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.inputs import RowTables
from minisgl_backend.sampling import logprobs
from minisgl_backend.sampling.gumbel import gumbel, row_keys
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.metadata import SamplingInputs
from minisgl_backend.sampling.penalties import PenaltyCounts

if TYPE_CHECKING:
    from minisgl_backend.kernels.sampling.launch import SamplingKernels

UNIT = float(1 << 40)  # scale of integer probabilities, relative to the largest one


class Sampler:
    """Samples by the rows' parameters. Steps that need temperature alone call only `sample_plain`.

    Token tensors are int32 [2, n]: the tokens, and 1 where the logits were finite, 0 where they were NaN or infinite.
    """

    def __init__(
        self,
        params: torch.Tensor,
        tokens: torch.Tensor,
        penalties: PenaltyCounts,
        rules: TokenRules,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`params` int32 [max_rows, NUM_PARAMS] and `tokens` int32 [max_rows, max_seq_len + 1] are those of the rows.

        `kernels`: where these can run; see `sampling_kernels`.
        """
        self._params, self._penalties, self._rules, self._kernels = params, penalties, rules, kernels
        self._tables = RowTables(params, tokens, penalties.counts, rules.counts, rules.rules, rules.prefixes)

    def sample_plain(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Temperature or greedy sampling, as captured in graphs: logits [n, vocab_size], rows and positions [n].

        Rows that need more than that get an arbitrary token, which `sample_extended` overwrites.
        """
        if self._kernels is not None:
            return self._kernels.sample_plain(logits, rows, positions, self._params)
        library = cpu_library() if logits.dtype in HALF and logits.is_cpu else None
        if library is None:
            return self._draw(logits.to(torch.float32), self._params[rows], positions, None)
        logits, token_ids = logits.contiguous(), torch.empty((2, len(logits)), dtype=torch.int32)
        rows, positions = rows.int().contiguous(), positions.int().contiguous()
        library.minisgl_sample(
            HALF[logits.dtype],
            logits.data_ptr(),
            *logits.shape,
            rows.data_ptr(),
            positions.data_ptr(),
            self._params.data_ptr(),
            layout.NUM_PARAMS,
            token_ids.data_ptr(),
        )
        return token_ids

    def sample_extended(self, logits: torch.Tensor, inputs: SamplingInputs, token_ids: torch.Tensor) -> None:
        """Overwrites the tokens of rows that need more than temperature, in `token_ids` [2, n or more]."""
        if not inputs.flags & layout.EXTENDED:
            return
        if inputs.rounds:
            self._sample_in_rounds(logits, inputs, token_ids)
            return
        if self._kernels is not None:
            self._kernels.sample_extended(logits, inputs, self._tables, token_ids)
            return
        flags = self._params[inputs.rows, layout.FLAGS]
        indices = torch.nonzero(flags & layout.EXTENDED).squeeze(1)
        params, rows = self._params[inputs.rows[indices]], inputs.rows[indices]
        edited = self._edit(logits[indices].to(torch.float32), indices, flags[indices], inputs)
        found = self._draw(edited, params, inputs.positions[indices], flags[indices])
        token_ids[:, indices] = found
        penalised = torch.nonzero(flags[indices] & layout.PENALTIES).squeeze(1)
        self._penalties.count(rows[penalised], found[0, penalised])

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """Samples every row, whatever it needs; logits [n, vocab_size] of any float type are not changed."""
        token_ids = self.sample_plain(logits, inputs.rows, inputs.positions)
        self.sample_extended(logits, inputs, token_ids)
        return token_ids

    def _sample_in_rounds(self, logits: torch.Tensor, inputs: SamplingInputs, token_ids: torch.Tensor) -> None:
        """Round by round, since penalties count what earlier rounds sampled. After a wrong draft they count rejected
        tokens, but what is sampled there is rejected, too."""
        for indices in inputs.rounds:
            index = indices.long()
            part = dataclasses.replace(
                inputs,
                rows=inputs.rows[index],
                positions=inputs.positions[index],
                mask_index=None if inputs.mask_index is None else inputs.mask_index[index],
                rounds=(),
            )
            sampled = token_ids[:, index]
            self.sample_extended(logits[index], part, sampled)
            token_ids[:, index] = sampled

    def logprobs(self, logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        """See logprobs.pack, for rows `indices` [k] of logits [n, vocab_size]; `token_ids` [n] belong to all rows."""
        if self._kernels is not None:
            return self._kernels.pack_logprobs(logits, indices, token_ids, top)
        return logprobs.pack(logits[indices], token_ids[indices], top)

    def _edit(
        self, raw: torch.Tensor, indices: torch.Tensor, flags: torch.Tensor, inputs: SamplingInputs
    ) -> torch.Tensor:
        """Logits float32 [k, vocab_size] of the rows `indices` [k] after penalties, rules and masks."""
        logits, rows, positions = raw, inputs.rows[indices], inputs.positions[indices]
        if inputs.flags & layout.PENALTIES:
            floats = self._params[rows].view(torch.float32)
            penalised = self._penalties.apply(logits, rows, floats)
            logits = torch.where((flags & layout.PENALTIES).bool().unsqueeze(1), penalised, logits)
        if inputs.flags & layout.RULES:
            ruled = torch.nonzero(flags & layout.RULES).squeeze(1)
            logits = logits.clone() if logits is raw else logits
            logits[ruled] = self._rules.apply(logits[ruled], rows[ruled], positions[ruled], self._tables.tokens)
        if inputs.mask_index is not None and inputs.mask_bits is not None:
            index = inputs.mask_index[indices]
            masked = torch.nonzero(index >= 0).squeeze(1)
            logits = logits.clone() if logits is raw else logits
            logits[masked] = apply_bitmask(logits[masked], raw[masked], inputs.mask_bits[index[masked]])
        return logits

    def _draw(
        self, logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor, flags: torch.Tensor | None
    ) -> torch.Tensor:
        """int32 [2, k] sampled from logits float32 [k, vocab_size]; without `flags`, nothing is filtered."""
        floats = params.view(torch.float32)
        temperature = floats[:, layout.TEMPERATURE]
        greedy = temperature == 0.0
        inverse = (1.0 / torch.where(greedy, 1.0, temperature)).unsqueeze(1)
        scores = logits * inverse
        if flags is not None:
            filtered = torch.nonzero(flags & layout.FILTERS).squeeze(1)
            if len(filtered):
                kept = kept_tokens(logits[filtered], params[filtered], bool((flags & layout.RANKED).any()))
                scores[filtered] = scores[filtered].masked_fill_(~kept, float("-inf"))
        key0, key1 = row_keys(params[:, layout.SEED_LOW], params[:, layout.SEED_HIGH], positions)
        vocabulary = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        if not bool(greedy.all()):
            scores = gumbel(key0, key1, vocabulary).masked_fill_(greedy.unsqueeze(1), 0.0).add_(scores)
        best, token_ids = torch.max(scores, dim=1)
        return torch.stack([token_ids.to(torch.int32), torch.isfinite(best).to(torch.int32)])


def sampling_kernels(max_rows: int, vocab_size: int, device: torch.device) -> SamplingKernels | None:
    """The sampling kernels of this device; None where these cannot run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    # Imported late: the package is missing on machines without a GPU.
    from minisgl_backend.kernels.sampling.launch import SamplingKernels

    return SamplingKernels(max(max_rows, logprobs.PROMPT_SLAB), vocab_size, device)


def apply_bitmask(logits: torch.Tensor, raw: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Logits float32 [k, vocab_size] with -inf for tokens whose bit is 0.

    Token t's bit is bit t % 32 of word t // 32, as grammar compilers write it; bits int32 [k, ceil(vocab_size / 32)].
    Where bad words or min_tokens exclude all that the grammar allows, the grammar wins: those rows get their `raw`
    logits back.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    chosen = logits.masked_fill(~(allowed | torch.isnan(logits)), float("-inf"))
    nothing_left = (chosen == float("-inf")).all(dim=1, keepdim=True)
    return torch.where(nothing_left, raw.masked_fill(~allowed, float("-inf")), chosen)


def kept_tokens(logits: torch.Tensor, params: torch.Tensor, ranked: bool) -> torch.Tensor:
    """Which tokens min-p, top-k and top-p keep: bool [k, vocab_size] for logits float32 [k, vocab_size].

    `params` int32 [k, NUM_PARAMS]; without `ranked`, only min-p applies.
    """
    floats = params.view(torch.float32)
    inverse = (1.0 / floats[:, layout.TEMPERATURE]).unsqueeze(1)
    scaled = logits * inverse
    largest = logits.amax(dim=1, keepdim=True)
    # log(0) drops none.
    kept = (scaled >= largest * inverse + torch.log(floats[:, layout.MIN_P]).unsqueeze(1)) & (logits > float("-inf"))
    if not ranked:
        return kept
    masses = (torch.exp((logits - largest) * inverse) * UNIT).to(torch.int64).masked_fill_(~kept, 0)
    keys = logprobs.order_keys(logits.masked_fill(~kept, float("-inf")))
    top_k, top_p = params[:, layout.TOP_K].unsqueeze(1), floats[:, layout.TOP_P].unsqueeze(1)
    width = int(torch.where(top_k > 0, top_k, logits.shape[1]).max())
    ids = logprobs.key_token_ids(torch.topk(keys, width, dim=1)[0]).long()
    rank = torch.arange(width, dtype=torch.int32, device=logits.device)
    inside = (rank < top_k) | (top_k == 0)
    masses = masses.gather(1, ids).masked_fill_(~inside, 0)
    sums = masses.cumsum(dim=1)
    limit = (sums[:, -1:].to(torch.float64) * top_p.to(torch.float64)).to(torch.int64).clamp_(min=1)
    # top_p 1 keeps everything.
    inside &= (sums - masses < limit) | (top_p >= 1.0)
    return kept & torch.zeros_like(kept).scatter_(1, ids, inside)
