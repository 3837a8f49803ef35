"""Greedy answers with and without drafts: how many differ, and how near a tie is where they differ first.

A larger batch is multiplied by other kernels, which round otherwise, so that in bfloat16 an answer may change with its
company: without speculation as with it. What is asked is that drafts change no more answers than company does, and
those where the two best tokens are about as likely.

Random weights would make most steps a tie. Here the output projection prefers one token behind each token, so strongly
that some of the answers come near a tie: how strongly is found by asking the model itself. Most of the best logits are
between 2 and 4 then, where numbers of bfloat16 lie 0.016 apart: what counts as near, 0.05, is three of these. The
drafts are the tokens of the plain run, one in four of them another one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speculation_engine import TOKEN_IDS
from minisgl_backend import LLM
from minisgl_backend.arrays import Int32Array
from minisgl_backend.environment import Environment
from minisgl_backend.text.answers import RequestOutput
from tests.proposers import EveryDraft, KnowingProposer

BATCH = 8  # answers side by side
PROMPT = 16  # tokens, of which no two prompts have the same
NEAR_TIE = 0.05  # between the two best logits
TIED_SHARE = 0.15  # of answers that come to a near tie; some of them differ
HALVED = 0.5  # factor of the output projection, and so of all logits
EMBEDDED = 25.0  # factor of the embeddings, so that the last token is seen behind all layers
PREFERENCES = (0.0, 1.0)  # between these lies the one that gives TIED_SHARE
TURNS = 7  # of the search for it
CHUNK = 16_384  # rows of the output projection that are changed at a time


def compare(model: Path, *, drafts: int, answers: int, tokens: int, **options: Any) -> dict[str, float]:
    """Figures of `answers` answers of `tokens` tokens each. options: of the engine."""
    environment = Environment.read({**os.environ, "LOG_LEVEL": os.environ.get("LOG_LEVEL", "WARNING")})
    config = {"method": "ngram", "num_speculative_tokens": drafts}
    with LLM(
        str(model),
        environment=environment,
        dummy_weights=True,
        speculative_config=config,
        max_running_requests=max(answers, BATCH),
        **options,
    ) as llm:
        asked = _Asked(llm, answers, tokens)
        preference, tied = asked.prefer(TIED_SHARE)
        plain = asked.plain(BATCH, logprobs=2)
        alone = asked.plain(1)
        speculated, delivered = asked.speculated(plain, drafts)
    return {
        "answers": answers,
        "tokens": tokens,
        "preference": preference,
        "near_ties": tied,
        "delivered": delivered,
        "share_that_differs": _differing(plain, speculated)[0],
        "share_between_batches": _differing(plain, alone)[0],
        "largest_gap": _differing(plain, speculated)[1],
        "largest_gap_between_batches": _differing(plain, alone)[1],
    }


class _Asked:
    """The prompts, and an engine that answers them."""

    def __init__(self, llm: LLM, answers: int, tokens: int) -> None:
        self._llm, self._tokens = llm, tokens
        self._vocab_size = llm.engine.welcome.vocab_size
        rng = np.random.default_rng(0)
        self._prompts = rng.integers(0, min(TOKEN_IDS, self._vocab_size), (answers, PROMPT)).tolist()

    def prefer(self, share: float) -> tuple[float, float]:
        """Gives the model's output projection a preference of such a strength that about this share of the answers
        comes to a near tie. Returns the strength, and the share."""
        model: Any = self._llm.engine.core._runner._model  # type: ignore[attr-defined]
        embedding, head = model.model.embed_tokens.weight.data, model.lm_head.method.weight.data
        embedding.mul_(EMBEDDED)
        head.mul_(HALVED)
        generator = torch.Generator().manual_seed(0)
        follows = torch.randperm(self._vocab_size, generator=generator).to(head.device)
        noise = head.clone()
        weak, strong = PREFERENCES
        tied = 0.0
        for turn in range(TURNS):
            strength = strong if turn == TURNS - 1 else (weak + strong) / 2
            for first in range(0, self._vocab_size, CHUNK):
                rows = embedding[first : first + CHUNK].float()
                next_ids = follows[first : first + CHUNK]
                direction = rows / rows.norm(dim=1, keepdim=True)
                head[next_ids] = (noise[next_ids].float() + strength * direction).to(head.dtype)
            if head.is_cuda:
                torch.cuda.synchronize()  # the engine may compute on another stream
            answers = self.plain(len(self._prompts), logprobs=2)
            tied = float(np.mean([min(_gaps(answer)) < NEAR_TIE for answer in answers]))
            if tied > share:
                weak = strength
            else:
                strong = strength
        return strength, tied

    def plain(self, batch: int, **options: Any) -> list[RequestOutput]:
        """Without speculation, `batch` of them side by side."""
        return self._answers(batch, speculative=False, **options)

    def speculated(self, plain: Sequence[RequestOutput], drafts: int) -> tuple[list[RequestOutput], float]:
        """With drafts, all of them verified; and the tokens that a step has delivered of a row."""
        known = {tuple(prompt): answer.token_ids for prompt, answer in zip(self._prompts, plain, strict=True)}

        def follow(uid: int, token_ids: Int32Array, most: int) -> list[int]:
            done = len(token_ids) - PROMPT
            return known[tuple(token_ids[:PROMPT].tolist())][done : done + most]

        drafting: Any = self._llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        drafting._control = EveryDraft(drafts)
        drafting._proposer = KnowingProposer("erring", self._vocab_size, follow)
        before = sum(self._llm.stats.speculation.accepted)
        answers = self._answers(BATCH, speculative=True)
        total = len(answers) * self._tokens
        return answers, total / (total - sum(self._llm.stats.speculation.accepted) + before)

    def _answers(self, batch: int, **options: Any) -> list[RequestOutput]:
        found = []
        for first in range(0, len(self._prompts), batch):
            prompts = self._prompts[first : first + batch]
            found += self._llm.generate(prompts, temperature=0.0, max_tokens=self._tokens, ignore_eos=True, **options)
        return found


def _gaps(answer: RequestOutput) -> list[float]:
    """Between the two best logits, by token."""
    assert answer.logprobs is not None, "they were asked for"
    return [one.top[0] - one.top[1] for one in answer.logprobs]


def _differing(plain: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> tuple[float, float]:
    """The share of the answers that differ, and the largest gap between the two best logits of the plain run where
    they do first; 0 where none does."""
    gaps = []
    for answer, other in zip(plain, others, strict=True):
        if answer.token_ids != other.token_ids:
            pairs = zip(answer.token_ids, other.token_ids, strict=True)
            gaps.append(_gaps(answer)[next(at for at, (one, another) in enumerate(pairs) if one != another)])
    return len(gaps) / len(plain), max(gaps, default=0.0)
