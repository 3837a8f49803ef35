"""LFM2 through the whole engine: tokens are those of transformers' whole pass, whatever lies between pages: prefixes,
chunks, preemption, drafts, several answers, ranks, pages that hold no number before they are written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.arrays import Int32Array
from minisgl_backend.environment import Environment
from minisgl_backend.kv.pool import KVPool
from tests.gauge.harness import expect_short_answers
from tests.parity.captured import check_greedy
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint, save_tokenizer
from tests.proposers import EveryDraft, KnowingProposer

NUM_TOKENS, MOST = 40, 3
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": MOST}}
CAPTURED = {"cuda_graph_max_bs": 8, "cuda_graph_max_tokens": 64}
CELLS: dict[str, dict[str, Any]] = {
    "whole": {"page_size": 16},
    "chunks, captured, drafts": {
        "page_size": 16,
        "max_prefill_length": 40,
        "mixed_prefill_length": 7,
        **CAPTURED,
        **NGRAM,
    },
    "starved, drafts": {"page_size": 4, "num_pages": 50, "max_prefill_length": 24, "mixed_prefill_length": 4, **NGRAM},
}
MORE_CELLS: dict[str, dict[str, Any]] = {
    "page of one token": {"page_size": 1, "max_prefill_length": 50, **NGRAM},
    "page of 64": {"page_size": 64, "max_prefill_length": 70, "mixed_prefill_length": 5, **NGRAM},
    "nothing cached": {"page_size": 16, "cache_type": "naive", "max_prefill_length": 32, **CAPTURED},
    "two ranks": {"page_size": 16, "tp": 2, "max_prefill_length": 40, "mixed_prefill_length": 8, **CAPTURED, **NGRAM},
}
EAGER = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=True)


class Case:
    """Prompts of which some begin alike, one within a page of another, and repeat themselves for prompt lookup."""

    def __init__(self, name: str, folder: Path) -> None:
        save_checkpoint(name, folder)
        save_tokenizer(folder)
        self.folder, self.model = folder, reference_model(folder)
        draw = random.Random(name)
        shared = [draw.randrange(3, VOCAB_SIZE) for _ in range(50)]
        own = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 1, 70, 31)]
        self.prompts = [shared + own[0], own[1], shared[:33] * 2, own[2], shared + own[3], own[3] * 3]
        self._checked: dict[tuple[int, ...], tuple[int, ...]] = {}

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        assert len(tokens) == NUM_TOKENS or tokens[-1] == self.model.config.eos_token_id
        if self._checked.get(tuple(prompt)) != tuple(tokens):
            check_greedy(self.model, prompt, tokens)
            self._checked[tuple(prompt)] = tuple(tokens)

    def propose(self, llm: LLM) -> None:
        """From now on what is known to follow is drafted, and wrong tokens among it; a row without it has no drafts."""

        def follow(uid: int, tokens: Int32Array, most: int) -> list[int]:
            so_far = tokens.tolist()
            texts = [[*prompt, *answer] for prompt, answer in self._checked.items()]
            (text,) = [text for text in texts if text[: len(so_far)] == so_far][:1] or [so_far]
            return text[len(so_far) :][:most]

        drafting: Any = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        drafting._proposer, drafting._control = KnowingProposer("erring", VOCAB_SIZE, follow), EveryDraft(MOST)


@pytest.fixture(scope="module", params=["lfm2", pytest.param("lfm2_moe", marks=pytest.mark.full)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool's pages hold before they are written is no number."""
    make = KVPool.__init__

    def fill(pool: KVPool, *args: Any, **kwargs: Any) -> None:
        make(pool, *args, **kwargs)
        for layer in pool._layers:
            if isinstance(layer, torch.Tensor):
                layer.fill_(torch.nan)

    monkeypatch.setattr(KVPool, "__init__", fill)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in MORE_CELLS)])
def test_tokens_are_those_of_a_whole_pass(case: Case, cell: str) -> None:
    options = {"num_pages": 400, "max_running_requests": 5, **(CELLS | MORE_CELLS)[cell]}
    # Answers that may end early are admitted in the hope that they do.
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": "starved" not in cell}
    with LLM(str(case.folder), environment=EAGER, dtype="float32", max_seq_len_override=160, **options) as llm:
        if "starved" in cell:
            expect_short_answers(llm)
        for prompts in (case.prompts, case.prompts[::-1]):
            for prompt, output in zip(prompts, llm.generate(prompts, **sampling), strict=True):
                case.check(prompt, output.token_ids)
            if "speculative_config" in options:
                case.propose(llm)
        # A second turn: the first answer, and a text of its own.
        (first,) = llm.generate(case.prompts[:1], **sampling)
        turn = [*case.prompts[0], *first.token_ids, 7, 8, 9]
        (second,) = llm.generate([turn], **sampling)
        case.check(turn, second.token_ids)
        if options.get("cache_type") != "naive":
            page = options["page_size"]
            assert second.num_cached_tokens >= (len(turn) - 4) // page * page - (page if page > 1 else 0)
        if "starved" in cell:
            assert llm.stats.total_preempted > 0
        if "speculative_config" in options:
            assert 0 < sum(llm.stats.speculation.accepted) < sum(llm.stats.speculation.drafted)
        assert llm.stats.pages_leased == 0


def test_several_answers_and_aborts(case: Case) -> None:
    """Siblings read the prompt's pages; requests that are given up leave nothing to those that take their pages."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 60, "max_running_requests": 6, "max_prefill_length": 24}
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with LLM(str(case.folder), dtype="float32", max_seq_len_override=160, **options) as llm:
        several = llm.generate(case.prompts[:2], **{**sampling, "n": 3})
        for prompt, output in zip(case.prompts, several, strict=False):
            assert len(output.completions) == 3
            for answer in output.completions:
                case.check(prompt, answer.token_ids)
        for prompt in case.prompts[:3]:
            stream = llm.stream(prompt, **sampling)
            next(stream)
            stream.close()
        for prompt, output in zip(case.prompts, llm.generate(case.prompts, **sampling), strict=True):
            case.check(prompt, output.token_ids)
