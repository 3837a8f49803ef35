"""LiteLLM and LlamaIndex: embeddings, reranking, decisions. Arguments: the endpoint's base URL, Triton's own."""

from __future__ import annotations

import sys
from typing import Any

import litellm
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["What is 17 + 25?", "hello"]
URL, TRITON = sys.argv[1:3]
OPTIONS: dict[str, Any] = {"api_base": URL, "api_key": "none"}


def check_embeddings() -> list[list[float]]:
    found = litellm.embedding(model="openai/demo", input=TEXTS, encoding_format="float", **OPTIONS)
    vectors = [one["embedding"] for one in found.data]
    assert found.usage.prompt_tokens > 0, found.usage
    assert len(vectors) == 2, found
    return vectors


def check_triton(expected: list[list[float]]) -> None:
    found = litellm.embedding(model="triton/embedding", input=TEXTS, api_base=f"{TRITON}/v2/models/embedding/infer")
    for one, other in zip(found.data, expected, strict=True):
        assert all(abs(a - b) < 1e-4 for a, b in zip(one["embedding"], other, strict=True)), one


def check_reranking() -> None:
    found = litellm.rerank(
        model="hosted_vllm/demo", query="What is 2 + 2?", documents=["It is 4.", "hello"], top_n=1, **OPTIONS
    )
    assert len(found.results) == 1, found


def check_decisions() -> None:
    questions: list[dict[str, Any]] = [
        {"type": "predicate", "name": "question", "instructions": "Is it a question?"},
        {"type": "choice", "instructions": "What is it?", "choices": [{"value": "a sum"}, {"value": "a text"}]},
        {"type": "score", "instructions": "How long is it?", "levels": [{"label": "short"}, {"label": "long"}]},
    ]
    found = litellm.decisions(model="openai/demo", input=TEXTS[0], questions=questions, **OPTIONS)
    predicate, choice, score = found.answers
    assert (predicate.name, 0 < predicate.probability < 1) == ("question", True), found
    assert choice.choice in ("a sum", "a text"), found
    assert abs(sum(one.probability for one in choice.probabilities) - 1) < 1e-4, found
    assert 0 <= score.score <= 1, found


def check_llama_index(expected: list[list[float]]) -> None:
    model = OpenAILikeEmbedding(model_name="demo", **OPTIONS)
    found = model.get_text_embedding_batch(TEXTS)
    assert all(abs(a - b) < 1e-4 for a, b in zip(found[0], expected[0], strict=True)), found[0]


if __name__ == "__main__":
    vectors = check_embeddings()
    check_triton(vectors)
    check_reranking()
    check_decisions()
    check_llama_index(vectors)
    print("all is well")
