"""Embeddings and scores of the whole stack: OpenAI's package, Triton's `infer`, vllm_backend's way, the client."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest

from client import Client
from client.errors import InvalidRequest
from minisgl_backend import LLM
from tests.e2e.openai_stack import Endpoint

pytestmark = pytest.mark.e2e

TEXTS = ["What is 17 + 25?", "Count from 1 to 9.", "hello"]


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", num_pages=256, page_size=16, max_running_requests=8) as llm:
        yield llm


def close_to(found: Any, expected: Any) -> bool:
    return bool(np.allclose(np.array(found), np.array(expected), atol=1e-4))


def test_openais_package(endpoint: Endpoint, offline: LLM) -> None:
    client = endpoint.client()
    expected = [output.embedding for output in offline.embed(TEXTS)]
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="demo", input=TEXTS, **options)  # type: ignore[call-overload]
        if options.get("encoding_format") == "base64":
            assert all(isinstance(one.embedding, (str, list)) for one in found.data)
            continue
        assert close_to([one.embedding for one in found.data], expected)
    assert found.usage.prompt_tokens == sum(len(offline.tokenizer.encode(text)) for text in TEXTS)
    ids = [offline.tokenizer.encode(text) for text in TEXTS]
    assert close_to([one.embedding for one in client.embeddings.create(model="demo", input=ids).data], expected)
    (one,) = client.embeddings.create(model="demo", input=ids[0]).data
    assert close_to(one.embedding, expected[0])
    (cut,) = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=16).data
    assert close_to(cut.embedding, expected[0][:16] / np.linalg.norm(expected[0][:16]))
    for wrong, message in (
        ("", "input"),
        ([], "input"),
        ([[]], "input"),
        ([10**7], "token id"),
        ("x " * 5000, "too long"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.embeddings.create(model="demo", input=wrong)
    with pytest.raises(openai.BadRequestError, match="dimensions is 4000"):
        client.embeddings.create(model="demo", input="x", dimensions=4000)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="x")


def test_many_texts_beside_chats(endpoint: Endpoint) -> None:
    """As many as a request may have, in their order, while chats run."""
    client, texts = endpoint.client(), [f"number {index}" for index in range(150)]
    said: list[str] = []

    def chat() -> None:
        message: Any = [{"role": "user", "content": "What is 17 + 25?"}]
        answer = client.chat.completions.create(model="demo", messages=message, max_tokens=20, temperature=0)
        said.append(answer.choices[0].message.content or "")

    chats = [threading.Thread(target=chat) for _ in range(4)]
    for thread in chats:
        thread.start()
    found = client.embeddings.create(model="demo", input=texts).data
    for thread in chats:
        thread.join()
    assert len(set(said)) == 1
    alone = [client.embeddings.create(model="demo", input=texts[index]).data[0] for index in (0, 77, 149)]
    assert close_to([found[index].embedding for index in (0, 77, 149)], [one.embedding for one in alone])


def test_reranking_and_scores(endpoint: Endpoint, offline: LLM) -> None:
    query, documents = "What is 2 + 2?", ["It is 4.", "Count!", "hello"]
    expected = offline.score(query, documents)
    order = sorted(range(3), key=lambda index: -expected[index])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = {"model": "demo", "query": query, "documents": documents, "top_n": 2}
        status, answer = endpoint.post(path, body)
        assert status == 200, answer
        assert [one["index"] for one in answer["results"]] == order[:2]
        assert close_to([one["relevance_score"] for one in answer["results"]], sorted(expected)[::-1][:2])
        assert all(("document" in one) == (path != "/v2/rerank") for one in answer["results"])
    objects = [{"text": text} for text in documents]
    status, answer = endpoint.post("/v2/rerank", {"query": query, "documents": objects, "return_documents": True})
    assert [one["document"]["text"] for one in answer["results"]] == [documents[index] for index in order]
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    for path in ("/v1/score", "/score"):
        status, answer = endpoint.post(path, {"text_1": query, "text_2": documents})
        assert close_to([one["score"] for one in answer["data"]], expected), answer
    status, answer = endpoint.post("/v1/score", {"text_1": [query, "x"], "text_2": documents})
    assert (status, answer["error"]["param"]) == (400, "text_1")
    status, answer = endpoint.post("/v1/rerank", {"query": query, "documents": ["x " * 5000]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert endpoint.post("/v1/rerank", {"query": query, "documents": ["x " * 5000], "max_tokens_per_doc": 9})[0] == 200


def test_the_shapes_of_text_embeddings_inference(endpoint: Endpoint, offline: LLM) -> None:
    """As rerankers, LlamaIndex, LiteLLM and huggingface_hub send them."""
    query, texts = "What is 2 + 2?", ["It is 4.", "Count!", "hello"]
    expected = offline.score(query, texts)
    order = sorted(range(3), key=lambda index: -expected[index])
    plain: dict[str, Any] = {"query": query, "texts": texts}
    litellm: dict[str, Any] = {
        "raw_scores": False,
        "truncate": False,
        "truncation_direction": "Right",
        "return_text": True,
        "top_n": 2,
    }
    for path in ("/rerank", "/v1/rerank"):
        others: Sequence[dict[str, Any]] = ({}, {"model": "demo", "top_n": 3, "return_text": True}, litellm)
        for more in others:
            status, answer = endpoint.post(path, {**plain, **more})
            assert (status, [one["index"] for one in answer]) == (200, order[: more.get("top_n", 3)]), answer
            assert close_to([one["score"] for one in answer], [expected[one["index"]] for one in answer])
            shown = [texts[one["index"]] if more else None for one in answer]
            assert [one.get("text") for one in answer] == shown
    status, answer = endpoint.post("/rerank", {**plain, "raw_scores": True})
    logits = np.log(np.array(expected) / (1 - np.array(expected)))
    assert close_to([one["score"] for one in answer], [logits[one["index"]] for one in answer])
    status, answer = endpoint.post("/score", {"text_1": query, "text_2": texts, "use_activation": False})
    assert close_to([one["score"] for one in answer["data"]], logits)
    long = {"query": query, "texts": ["x " * 5000, "It is 4."]}
    status, answer = endpoint.post("/rerank", long)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "texts")
    status, answer = endpoint.post("/rerank", {**long, "truncate": True})
    assert close_to([one["score"] for one in answer if one["index"]], expected[:1])

    vectors = [output.embedding for output in offline.embed(texts)]
    for given, found in ((texts, vectors), (texts[0], vectors[:1]), (offline.tokenizer.encode(texts[0]), vectors[:1])):
        status, answer = endpoint.post("/embed", {"inputs": given, "truncate": True})
        assert status == 200
        assert close_to(answer, found)
    plain_vector = offline.embed(texts[0], normalize=False)[0].embedding
    assert close_to(endpoint.post("/embed", {"inputs": texts[0], "normalize": False})[1], [plain_vector])
    assert endpoint.post("/embed", {"inputs": ["x " * 5000], "truncate": True})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "x"}, "documents"),
        ("/rerank", {"query": "x", "texts": ["a"], "documents": ["a"]}, "texts"),
        ("/rerank", {"query": "x", "documents": ["a"], "return_text": True}, "return_text"),
        ("/rerank", {"query": "x", "texts": ["a"], "return_documents": True}, "return_documents"),
        ("/rerank", {"texts": ["a"]}, "query"),
        ("/rerank", {"query": "x", "texts": ["a"], "documents": None, "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x " * 5000, "texts": ["a"], "truncate": True}, "query"),
        ("/rerank", {"query": "x", "texts": []}, "texts"),
        ("/rerank", {"query": "x", "texts": [1]}, "texts"),
        ("/rerank", {"query": "x", "texts": ["\ud800"]}, "texts"),
        ("/rerank", {"query": "x", "texts": ["a"], "truncation_direction": "Up"}, "truncation_direction"),
        (
            "/rerank",
            {"query": "x", "texts": ["a"], "truncate": True, "truncation_direction": "Left"},
            "truncation_direction",
        ),
        ("/embed", {}, "inputs"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": "x", "dimensions": 0}, "dimensions"),
        ("/embed", {"inputs": "x", "prompt_name": "query"}, "prompt_name"),
        ("/embed", {"inputs": [10**9]}, "inputs"),
    ],
)
def test_what_is_wrong_in_these_shapes_is_named(endpoint: Endpoint, path: str, body: Any, param: str) -> None:
    status, answer = endpoint.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_tritons_infer_as_litellm_sends_it(endpoint: Endpoint, offline: LLM) -> None:
    """Every output of the answer is an embedding to it, so there must be no other."""
    expected = [output.embedding for output in offline.embed(TEXTS)]
    body = {"inputs": [{"name": "input_text", "shape": [3], "datatype": "BYTES", "data": TEXTS}]}
    status, answer = post_triton(endpoint, "embedding/infer", body)
    assert status == 200, answer
    ((output),) = answer["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [3, len(expected[0])])
    assert close_to(np.reshape(output["data"], output["shape"]), expected)
    body["inputs"].append({"name": "query", "shape": [1], "datatype": "BYTES", "data": ["What is 2 + 2?"]})
    ((output),) = post_triton(endpoint, "embedding/infer", body)[1]["outputs"]
    assert close_to(output["data"], offline.score("What is 2 + 2?", TEXTS))
    body["inputs"] = [{"name": "dimensions", "shape": [1], "datatype": "INT32", "data": [5000]}, body["inputs"][0]]
    status, answer = post_triton(endpoint, "embedding/infer", body)
    assert (status, "dimensions is 5000" in answer["error"]) == (400, True)
    assert post_triton(endpoint, "embedding/infer", {"inputs": body["inputs"][:1]})[0] == 400


def test_vllm_backends_embedding_request(endpoint: Endpoint, offline: LLM) -> None:
    (expected,) = offline.embed(TEXTS[0], dimensions=8)
    ids = offline.tokenizer.encode(TEXTS[0])
    for given in (TEXTS[0], ids):
        request = json.dumps({"input": given, "pooling_params": {"dimensions": 8}})
        body = {"text_input": "", "embedding_request": request}
        status, answer = post_triton(endpoint, "vllm_model/generate", body)
        assert status == 200, answer
        assert close_to(json.loads(answer["text_output"]), expected.embedding)
    body = {"text_input": "", "embedding_request": json.dumps({"input": "x", "pooling_params": {"softmax": True}})}
    status, answer = post_triton(endpoint, "vllm_model/generate", body)
    assert (status, "softmax" in answer["error"]) == (400, True)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client(endpoint: Endpoint, offline: LLM, protocol: Any) -> None:
    expected = [output.embedding for output in offline.embed(TEXTS)]
    port = endpoint.server.grpc if protocol == "grpc" else endpoint.server.http
    with Client(f"127.0.0.1:{port}", protocol) as client:
        found = client.embed(TEXTS)
        assert close_to(found.vectors, expected)
        assert found.num_input_tokens == sum(len(offline.tokenizer.encode(text)) for text in TEXTS)
        assert close_to(client.score("What is 2 + 2?", TEXTS), offline.score("What is 2 + 2?", TEXTS))
        with pytest.raises(InvalidRequest, match="dimensions is 0"):
            client.embed("x", dimensions=0)


def test_minisgl_embed(endpoint: Endpoint) -> None:
    command = [
        sys.executable,
        "-m",
        "client",
        "embed",
        "--url",
        f"127.0.0.1:{endpoint.server.grpc}",
        "--dimensions",
        "4",
    ]
    found = subprocess.run([*command, "hello", "x"], capture_output=True, text=True, timeout=120, check=True)
    assert [len(json.loads(line)) for line in found.stdout.splitlines()] == [4, 4]


def post_triton(endpoint: Endpoint, path: str, body: Any) -> tuple[int, Any]:
    other = Endpoint(f"http://127.0.0.1:{endpoint.server.http}", endpoint.server, endpoint.processes)
    return other.post(f"/v2/models/{path}", body)
