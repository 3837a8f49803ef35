"""Speculation on a GPU, in captured steps: with drafts as without, whatever is proposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.registry import import_failure
from minisgl_backend.models.folder import find_model_dir
from tests.eagle3_heads import DEMO_LAYERS, demo_head, eagle3_head, reference_drafts
from tests.gauge.harness import engine
from tests.parity.checkpoints import reference_model
from tests.proposers import (
    KINDS,
    EveryDraft,
    KnowingProposer,
    draft_model,
    proposals_in_answers,
    proposals_of,
    verify_every_draft,
)
from tests.random_requests import VOCAB_SIZE, alone, ask_core, assert_same, random_requests

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MOST = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST}
MTP: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": MOST}}
LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
SIZES: dict[str, Any] = {"longest_prompt": 160, "most_tokens": 16, "grammars": False}
SHARED: dict[str, Any] = {"max_running_requests": 16, "attention_backend": "triton", "dtype": "float32"}


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
def test_answers_are_those_without_speculation(graphs: int) -> None:
    """In float32, where rounding swaps no tokens; without drafts Triton's kernels rotate and attend at once."""
    shared = {**SHARED, "cuda_graph_max_bs": graphs}
    rounds = {seed: random_requests(5000 + seed, 6, **SIZES) for seed in range(len(KINDS))}
    with engine(**shared) as llm:
        expected = {
            seed: [ask_core(llm.engine.core, [alone(one)])[0] for one in requests] for seed, requests in rounds.items()
        }
    with engine(**shared, speculative_config=NGRAM) as llm:
        drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        drafting._control = EveryDraft(MOST)
        for seed, requests in rounds.items():
            prompts = [len(one.token_ids) for one in requests for _ in range(one.params.n)]
            said = [answer.token_ids for answers in expected[seed] for answer in answers]

            def follow(uid: int, token_ids: Int32Array, most: int) -> list[int]:
                done = len(token_ids) - prompts[uid]  # noqa: B023  called in this round alone
                return said[uid][done : done + most]  # noqa: B023

            drafting._proposer = KnowingProposer(KINDS[seed], VOCAB_SIZE, follow, seed)
            assert_same(requests, expected[seed], ask_core(llm.engine.core, requests))
        counts = llm.stats.speculation
        assert llm.stats.pages_leased == 0
    assert 0 < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.parametrize("backend", ["triton", "fa", "fi", "fa,trtllm"])
def test_right_drafts_are_accepted_by_every_backend(backend: str) -> None:
    """In bfloat16 a larger batch may swap two tokens that are about as likely: nearly all right drafts are accepted."""
    for name in backend.split(","):
        package = BACKENDS[name].library.package
        if package is not None and (why := import_failure(package)) is not None:
            pytest.skip(why)
    shared = {**SHARED, "attention_backend": backend, "dtype": "bfloat16", "page_size": 16}
    prompts = [[9, 40 + number, 77, 300 + number, 5, 640] for number in range(6)]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    with engine(**shared) as llm:
        said = [one.token_ids for one in llm.generate(prompts, **options)]
    with engine(**shared, speculative_config=NGRAM) as llm:
        drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        by_prompt = dict(zip(map(tuple, prompts), said, strict=True))

        def follow(uid: int, token_ids: Int32Array, most: int) -> list[int]:
            answer, done = by_prompt[tuple(token_ids[:6].tolist())], len(token_ids) - 6
            return list(answer[done : done + most])

        drafting._control, drafting._proposer = EveryDraft(MOST), KnowingProposer("right", VOCAB_SIZE, follow)
        found = [one.token_ids for one in llm.generate(prompts, **options)]
        counts = llm.stats.speculation
    same = sum(one == other for one, other in zip(said, found, strict=True))
    assert same >= len(prompts) - 1
    assert sum(counts.accepted) > 0.9 * sum(counts.drafted)


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("num_layers", [2, 6])
def test_a_model_that_proposes_changes_no_answer(graphs: int, num_layers: int, tmp_path: Path) -> None:
    shared = {**SHARED, "cuda_graph_max_bs": graphs}
    rounds = [random_requests(5000 + seed, 6, **SIZES) for seed in range(3)]
    with engine(**shared) as llm:
        expected = [[ask_core(llm.engine.core, [alone(one)])[0] for one in requests] for requests in rounds]
    with engine(**shared, **draft_model(tmp_path, num_layers, MOST)) as llm:
        verify_every_draft(llm, MOST)
        for requests, answers in zip(rounds, expected, strict=True):
            assert_same(requests, answers, ask_core(llm.engine.core, requests))
        before = llm.stats.speculation
        llm.generate([[*range(3, 40)], [9, 9, 9]], temperature=0.9, seed=7, max_tokens=40, ignore_eos=True)
        counts = llm.stats.speculation
        assert llm.stats.pages_leased == 0
    drafted, accepted = sum(counts.drafted) - sum(before.drafted), sum(counts.accepted) - sum(before.accepted)
    assert 0 < accepted <= drafted
    assert num_layers < 6 or accepted > 0.95 * drafted  # its passes round in another way than the target's batches


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
def test_an_eagle3_head_changes_no_answer(graphs: int) -> None:
    """The head that comes with the demo model: many of its drafts are right."""
    shared: dict[str, Any] = {**SHARED, "cuda_graph_max_bs": graphs}
    rounds = [random_requests(5000 + seed, 6, **SIZES) for seed in range(3)]
    with engine(**shared) as llm:
        expected = [[ask_core(llm.engine.core, [alone(one)])[0] for one in requests] for requests in rounds]
    with engine(**shared, **demo_head(MOST)) as llm:
        verify_every_draft(llm, MOST)
        for requests, answers in zip(rounds, expected, strict=True):
            assert_same(requests, answers, ask_core(llm.engine.core, requests))
        asked = [{"role": "user", "content": "Count from 1 to 20."}]
        before = llm.stats.speculation
        llm.chat([asked], temperature=0.0, max_tokens=40)
        counts = llm.stats.speculation
        assert llm.stats.pages_leased == 0
    drafted, accepted = sum(counts.drafted) - sum(before.drafted), sum(counts.accepted) - sum(before.accepted)
    assert accepted > 0.5 * drafted > 0


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
@pytest.mark.parametrize("drafted", [1024, 300], ids=["whole vocabulary", "part of it"])
def test_an_eagle3_head_drafts_as_plain_torch(graphs: int, drafted: int, tmp_path: Path) -> None:
    """Prompts in chunks and in pieces, beside each other, then chains behind right and wrong drafts. Rounding swaps a
    few drafts."""
    chunked: dict[str, Any] = {"max_prefill_length": 24, "cache_type": "naive", "cuda_graph_max_bs": graphs}
    with engine(**SHARED, **chunked, **eagle3_head(tmp_path, MOST, draft_vocab_size=drafted)) as llm:
        found = proposals_in_answers(llm, MOST)
    target = reference_model(find_model_dir("demo"))
    embedding = target.get_input_embeddings().weight.data
    same = []
    for known, proposed in found:
        with torch.inference_mode():
            hidden = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in DEMO_LAYERS], dim=-1)
        same.append(proposed == reference_drafts(tmp_path, states, known, embedding, len(proposed))[0])
    assert sum(same) >= 0.9 * len(same) > 0


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
def test_a_checkpoints_own_layer_changes_no_answer(graphs: int, tmp_path: Path) -> None:
    """Of latents; without experts, which rounding may swap."""
    from tests.mtp_checkpoints import NUM_LAYERS, served_mtp_checkpoint

    model = served_mtp_checkpoint(tmp_path, first_k_dense_replace=NUM_LAYERS + 1, **LATENTS)
    shared = {**SHARED, "model": model, "cuda_graph_max_bs": graphs}
    rounds = [random_requests(5000 + seed, 6, **SIZES) for seed in range(3)]
    with engine(**shared) as llm:
        expected = [[ask_core(llm.engine.core, [alone(one)])[0] for one in requests] for requests in rounds]
    with engine(**shared, **MTP) as llm:
        verify_every_draft(llm, MOST)
        for requests, answers in zip(rounds, expected, strict=True):
            assert_same(requests, answers, ask_core(llm.engine.core, requests))
        assert llm.stats.speculation.drafts > 0
        assert llm.stats.pages_leased == 0


@pytest.mark.parametrize("graphs", [16, 0], ids=["captured", "eager"])
def test_a_checkpoints_own_layer_drafts_as_plain_torch(graphs: int, tmp_path: Path) -> None:
    """With experts; prompts in chunks and in pieces, beside each other. Rounding swaps a few drafts."""
    from tests.mtp_checkpoints import Reference, served_mtp_checkpoint

    model = served_mtp_checkpoint(tmp_path, **LATENTS)
    chunked: dict[str, Any] = {"max_prefill_length": 24, "cache_type": "naive", "cuda_graph_max_bs": graphs}
    prompts = [[9, 9, 9], [5, 6, 7, 8] * 10, list(range(100, 155))]
    with engine(**SHARED, model=model, **chunked, **MTP) as llm:
        answers = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True, speculative=False)
        texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
        found = proposals_of(llm, texts, MOST)
        again = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert [one.token_ids for one in again] == [one.token_ids for one in answers]
    reference = Reference(tmp_path)
    same = [
        proposed == reference.drafts(reference.states(known[:-1]), known, len(proposed))[0] for known, proposed in found
    ]
    assert sum(same) >= 0.9 * len(same) > 0
