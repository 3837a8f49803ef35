"""Embeddings and scores of the whole engine against transformers, float32: over chunks, beside generating streams, and
with the prefix cached."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.models.pooling import EmbeddingDefaults, ScoreDefaults
from minisgl_backend.request import PoolingParams
from minisgl_backend.text.answers import PooledAnswer
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import make_checkpoint, save_tokenizer

TOLERANCE = 1e-5
# A family that generates, one with another head, one without any; what others differ in is in the layers.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 16},
    "LlamaForSequenceClassification": {"num_labels": 1, "pad_token_id": 0},
    "Qwen3ForSequenceClassification": {"num_labels": 3, "pad_token_id": 0, "head_dim": 16},
    "MistralModel": {"sliding_window": 24},
}
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(dim=0),
    "cls": lambda states: states[0],
}


class Case:
    """One checkpoint with its prompts, and the hidden states that transformers has for them."""

    def __init__(self, architecture: str, folder: Path) -> None:
        torch.manual_seed(1)
        model, _ = make_checkpoint(architecture, **CHECKPOINTS[architecture])
        model.save_pretrained(folder)
        save_tokenizer(folder)
        model = model.eval()
        generator = random.Random(architecture)
        shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(40)]
        own = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 90, 33)]
        self.prompts = [*own, [*shared, 5, 6], [*shared, 9]]
        body = getattr(model, "model", model)
        with torch.inference_mode():
            self.states = [body(torch.tensor([prompt])).last_hidden_state[0] for prompt in self.prompts]
            if "Classification" in architecture:
                self.scores = [model(torch.tensor([prompt])).logits[0] for prompt in self.prompts]
            if "Causal" in architecture:
                last = [model(torch.tensor([prompt])).logits[0, -1] for prompt in self.prompts]
                self.logprobs = [logits.log_softmax(dim=0) for logits in last]
        options: dict[str, Any] = {"page_size": 16, "num_pages": 256, "max_running_requests": 8}
        chunks = {"max_prefill_length": 24, "mixed_prefill_length": 8}
        self.llm = LLM(str(folder), dtype="float32", max_seq_len_override=256, **options, **chunks)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = Case(request.param, tmp_path_factory.mktemp("checkpoint"))
    yield found
    found.llm.close()


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for vector, meant in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, np.asarray(meant), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", POOLED)
def test_hidden_states_are_pooled(case: Case, kind: str) -> None:
    expected = [POOLED[kind](states) for states in case.states]
    for _ in range(2):  # the second time with every prompt in the prefix cache
        found = case.llm.embed(case.prompts, pooling=kind, normalize=False)
        assert_close([output.embedding for output in found], expected)
    assert any(output.num_cached_tokens for output in found) == (kind == "last")
    cut = [vector[:16] / vector[:16].norm() for vector in expected]
    assert_close([one.embedding for one in case.llm.embed(case.prompts, pooling=kind, dimensions=16)], cut)


def test_the_default_is_the_last_token_normalized(case: Case) -> None:
    expected = [states[-1] / states[-1].norm() for states in case.states]
    assert_close([output.embedding for output in case.llm.embed(case.prompts)], expected)
    with pytest.raises(InvalidRequestError, match="dimensions is 65; allowed: 1 to 64"):
        case.llm.embed("w3 ", dimensions=65)


def test_beside_generating_streams(case: Case) -> None:
    """In the same steps; what generates says the same as alone, and aborts leave no page behind."""
    if not hasattr(case, "logprobs"):
        with pytest.raises(InvalidRequestError, match="allowed: embed and score"):
            case.llm.generate([case.prompts[0]])
        return
    llm, values = case.llm, {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    alone = [one.token_ids for one in llm.generate(case.prompts[:3], **values)]
    streams = llm._answers(case.prompts[:3], None, values)
    kinds = [kind for kind in POOLED for _ in case.prompts]
    pooled = [
        PooledAnswer(llm._new_uid(1), prompt, PoolingParams(kind=kind))  # type: ignore[arg-type]
        for kind, prompt in zip(kinds, case.prompts * len(POOLED), strict=True)
    ]
    with contextlib.closing(llm._driver.turns([*streams, *pooled])) as turns:
        for _ in turns:
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
    expected = [POOLED[kind](states) for kind, states in zip(kinds, case.states * len(POOLED), strict=True)]
    assert_close([one.output().embedding for one in pooled], expected)
    assert [one.output().token_ids for one in streams] == alone
    left = [PooledAnswer(llm._new_uid(1), prompt, PoolingParams(kind="mean")) for prompt in case.prompts]
    with contextlib.closing(llm._driver.turns(left)) as turns:
        next(turns)
    assert llm.stats.pages_leased == 0


def test_scores_and_token_probabilities(case: Case) -> None:
    if hasattr(case, "scores"):
        found = case.llm._pooled(case.prompts, PoolingParams(kind="scores"))
        assert_close([output.embedding for output in found], case.scores)
        if len(case.scores[0]) == 1:
            (score,) = case.llm.score("w3 ", ["w5 "])
            assert 0 < score < 1
        else:
            with pytest.raises(InvalidRequestError, match="3 labels"):
                case.llm.score("w3 ", ["w5 "])
    elif hasattr(case, "logprobs"):
        asked = [5, 300, 7]
        found = case.llm._pooled(case.prompts, PoolingParams(kind="token_logprobs", token_ids=tuple(asked)))
        assert_close([output.embedding for output in found], [logprobs[asked] for logprobs in case.logprobs])


def test_yes_against_no() -> None:
    """Qwen3-Reranker's score, of the demo model: its prompt, and the softmax of two log-probabilities."""
    # In 32 bits: the second time the prompt is cached, and other kernels round its last tokens otherwise in 16.
    with LLM("demo", dtype="float32", num_pages=64, page_size=16, max_running_requests=4) as llm:
        (score,) = llm.score("What is 2 + 2?", "It is 4.")
        yes, no = (llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        assert llm.engine.model.generates
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        instruct = "Given a web search query, retrieve relevant passages that answer the query"
        user = f"<Instruct>: {instruct}\n<Query>: What is 2 + 2?\n<Document>: It is 4."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        prompt = llm.tokenizer.encode(llm.tokenizer.render(messages, enable_thinking=False), add_special_tokens=False)
        (output,) = llm._pooled([prompt], PoolingParams(kind="token_logprobs", token_ids=(yes, no)))
        both = np.exp(output.embedding)
        assert score == pytest.approx(both[0] / both.sum(), rel=1e-5)


@pytest.mark.full
def test_sentence_transformers_agrees(tmp_path: Path) -> None:
    """Its own files say how texts are pooled; texts, not token ids."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(1)
    model, _ = make_checkpoint("Qwen3Model", head_dim=16, pad_token_id=0)
    for mode, normalizes in (("mean", True), ("lasttoken", False), ("cls", True)):
        folder = tmp_path / mode
        model.save_pretrained(folder / "plain")
        save_tokenizer(folder / "plain")
        modules = sentence_transformers.sentence_transformer.modules
        parts = [modules.Transformer(str(folder / "plain")), modules.Pooling(64, pooling_mode=mode)]
        parts += [modules.Normalize()] if normalizes else []
        reference = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
        reference.tokenizer.pad_token = "w0 "
        reference.save(str(folder / "whole"))
        with LLM(str(folder / "whole"), dtype="float32", num_pages=64, page_size=16, max_seq_len_override=64) as llm:
            texts = ["w3 ", "w7 ", "w100 "]
            assert_close([one.embedding for one in llm.embed(texts)], list(reference.encode(texts)))


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, {}, ("last", True, False, "")),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}, ("last", True, True, "")),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, ("mean", False, True, "")),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, ("cls", False, True, "")),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, ("last", True, False, "the pooling is max")),
        (["Transformer", "Pooling"], {"pooling_mode": 3}, ("last", True, False, "the pooling is 3; allowed: one of")),
        (["Transformer", "Pooling"], {"pooling_mode": [["cls"]]}, ("last", True, False, "the pooling is [")),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, ("last", True, False, "has a module")),
    ],
)
def test_files_of_sentence_transformers(tmp_path: Path, modules: Any, pooling: Any, expected: Any) -> None:
    if modules is not None:
        listed = [{"type": f"sentence_transformers.models.{name}", "path": f"1_{name}"} for name in modules]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    found = EmbeddingDefaults.load(tmp_path)
    assert (found.kind, found.normalize, found.is_embedding_model) == expected[:3]
    assert expected[3] in found.not_served
    assert bool(found.not_served) == bool(expected[3])


@pytest.mark.parametrize(
    ("files", "raw", "not_served"),
    [
        ({}, False, ""),
        ({"config.json": {"problem_type": "regression"}}, True, ""),
        ({"config.json": {"problem_type": "single_label_classification"}}, False, ""),
        ({"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}}, True, ""),
        (
            {"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}},
            False,
            "",
        ),
        ({"config.json": {"sentence_transformers": {"version": "5.0"}}}, False, ""),
        ({"config.json": {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}}, True, ""),
        ({"config_sentence_transformers.json": {"activation_fn": "torch.nn.Identity"}}, True, ""),
        ({"config_sentence_transformers.json": {"activation_fn": "Sigmoid", "model_type": "CrossEncoder"}}, False, ""),
        (
            {"config.json": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}},
            False,
            "sentence_transformers.activation_fn is 'torch.nn.modules.activation.Tanh'; allowed: torch.nn's Sigmoid",
        ),
        (
            {"config_sentence_transformers.json": {"activation_fn": "os.Identity"}},
            False,
            "activation_fn is 'os.Identity'",
        ),
        (
            {
                "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
                "modules.json": [{"type": "a.Transformer"}, {"type": "a.Dense", "path": "2_Dense"}],
            },
            False,
            "has a module {'type': 'a.Dense'",
        ),
    ],
)
def test_what_a_rerankers_scores_are(tmp_path: Path, files: dict[str, Any], raw: bool, not_served: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = ScoreDefaults.load(tmp_path)
    assert found.raw == raw
    assert not_served in found.not_served
    assert bool(found.not_served) == bool(not_served)


def test_scores_are_as_the_head_has_them_where_the_files_say_so(tmp_path: Path) -> None:
    model, _ = make_checkpoint("LlamaForSequenceClassification", **CHECKPOINTS["LlamaForSequenceClassification"])
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("linear.Identity", "activation.Tanh"):
        file.write_text(json.dumps(config | {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}))
        with LLM(str(tmp_path), dtype="float32", num_pages=64, page_size=16, max_seq_len_override=64) as llm:
            if name == "activation.Tanh":
                with pytest.raises(InvalidRequestError, match=r"scores are not served: .*Tanh"):
                    llm.score("w3 ", "w5 ")
                continue
            (score,) = llm.score("w3 ", "w5 ")
            ids = llm.tokenizer.encode_pair("w3 ", "w5 ")
            with torch.inference_mode():
                assert score == pytest.approx(model.eval()(torch.tensor([ids])).logits.item(), abs=TOLERANCE)
