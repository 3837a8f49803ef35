"""Clients of text-embeddings-inference: rerankers, LlamaIndex, LiteLLM, huggingface_hub. Argument: the URL."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import litellm
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from rerankers import Reranker

URL = sys.argv[1]
QUERY, TEXTS = "What is 2 + 2?", ["It is 4.", "Count!", "hello"]
Scores = dict[int, float]  # by the text's number


def of_rerankers() -> Scores:
    ranker = Reranker("demo", model_type="text-embeddings-inference", api_key="none", url=f"{URL}/rerank")
    found = ranker.rank(query=QUERY, docs=TEXTS)
    return {TEXTS.index(one.document.text): one.score for one in found.results}


def of_llama_index() -> Scores:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranker = TextEmbeddingInference(base_url=URL, top_n=3)
    found = ranker.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY))
    return {TEXTS.index(one.node.get_content()): one.score for one in found}


def of_litellm() -> Scores:
    found = litellm.rerank(model="huggingface/demo", query=QUERY, documents=TEXTS, api_base=URL, api_key="none")
    return {one["index"]: one["relevance_score"] for one in found.results}


def vectors_of_llama_index() -> Sequence[Sequence[float]]:
    model = TextEmbeddingsInference(model_name="demo", base_url=URL, query_instruction="", text_instruction="")
    return model.get_text_embedding_batch(TEXTS)


def vectors_of_hugging_face() -> Sequence[Sequence[float]]:
    client = InferenceClient(model=f"{URL}/embed", token="none")
    return [client.feature_extraction(text, truncate=True, truncation_direction="right")[0] for text in TEXTS]


def vectors_of_litellm() -> Sequence[Sequence[float]]:
    options = {"api_base": f"{URL}/embed", "api_key": "none", "input_type": "embed"}
    return [one["embedding"] for one in litellm.embedding(model="huggingface/demo", input=TEXTS, **options).data]


def check_equal(found: Sequence[float], expected: Sequence[float]) -> None:
    assert all(abs(a - b) < 1e-4 for a, b in zip(found, expected, strict=True)), (found, expected)


if __name__ == "__main__":
    first, *others = of_rerankers(), of_llama_index(), of_litellm()
    assert sorted(first, key=lambda number: -first[number]) == list(first), first
    for scores in others:
        assert list(scores) == list(first), (scores, first)
        check_equal(list(scores.values()), list(first.values()))
    vectors, *more = vectors_of_llama_index(), vectors_of_hugging_face(), vectors_of_litellm()
    assert len(vectors) == len(TEXTS)
    for rows in more:
        for row, expected in zip(rows, vectors, strict=True):
            check_equal(list(row), list(expected))
    print("all is well")
