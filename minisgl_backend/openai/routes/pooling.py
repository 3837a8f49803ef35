"""Embeddings, reranking and scores, in the formats of OpenAI, Jina, Cohere, vLLM and text-embeddings-inference."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.requests.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl_backend.openai.requests.tei import AnyRerankRequest, TeiEmbedRequest, TeiRerankRequest
from minisgl_backend.openai.vectors import Vectors, numbers

COHERE_PATH = "/v2/rerank"
OPERATIONS = {  # by OpenTelemetry's names
    **dict.fromkeys(("/v1/embeddings", "/embed"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/rerank", COHERE_PATH), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}
_Body = EmbeddingRequest | RerankRequest | ScoreRequest | TeiEmbedRequest | TeiRerankRequest


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        name, request_id, found = await _vectors(endpoint, request, body)
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(row, body.encoding_format)}
            for index, row in enumerate(found.rows)
        ]
        return _answer({"object": "list", "data": data, "model": name, "usage": found.usage}, request_id)

    @app.post("/embed")
    async def embed(request: Request, body: TeiEmbedRequest) -> Response:
        _, request_id, found = await _vectors(endpoint, request, body)
        return _answer([numbers(row) for row in found.rows], request_id)

    @app.post("/v1/rerank")
    @app.post("/rerank")
    @app.post(COHERE_PATH)
    async def rerank(request: Request, body: AnyRerankRequest) -> Response:
        name, request_id, found = await _vectors(endpoint, request, body)
        if isinstance(body, TeiRerankRequest):
            return _answer(_tei_ranked(body, found), request_id)
        is_cohere = request.url.path == COHERE_PATH
        answer = {
            "id": f"rerank-{request_id}",
            "model": name,
            "usage": found.usage,
            "results": _ranked(body, found, with_documents=not is_cohere),
        }
        if is_cohere:
            tokens = {"input_tokens": found.usage["prompt_tokens"], "output_tokens": 0}
            answer["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens}
        return _answer(answer, request_id)

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: Request, body: ScoreRequest) -> Response:
        name, request_id, found = await _vectors(endpoint, request, body)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found.scores)]
        head = {"id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": name}
        return _answer({**head, "data": data, "usage": found.usage}, request_id)


async def _vectors(endpoint: Endpoint, request: Request, body: _Body) -> tuple[str, str, Vectors]:
    """(the model's name, the request's id, the answer). Raises ApiError, ClientLeft."""
    name = await endpoint.admit(body.model)
    context = context_of(request, body)
    fields = {**body.to_fields(), **await endpoint.model.adapter_fields(body)}
    return name, context.request_id, await endpoint.vectors(request, fields, context, body.names())


def _shown(row: bytes, encoding_format: str | None) -> str | list[float]:
    return base64.b64encode(row).decode() if encoding_format == "base64" else numbers(row)


def _ranked(body: RerankRequest, found: Vectors, *, with_documents: bool) -> list[dict[str, Any]]:
    returns_documents = with_documents if body.return_documents is None else body.return_documents
    texts = body.texts
    results: list[dict[str, Any]] = []
    for index in _best(found.scores, body.top_n):
        document = {"document": {"text": texts[index]}} if returns_documents else {}
        results.append({"index": index, **document, "relevance_score": found.scores[index]})
    return results


def _tei_ranked(body: TeiRerankRequest, found: Vectors) -> list[dict[str, Any]]:
    return [
        {"index": index, **({"text": body.texts[index]} if body.return_text else {}), "score": found.scores[index]}
        for index in _best(found.scores, body.top_n)
    ]


def _best(scores: Sequence[float], most: int | None) -> list[int]:
    """The indices of the best ones; equals in the order given. `most`: 0 or None: all."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[: most or None]


def _answer(value: Any, request_id: str) -> Response:
    return json_response(value, headers={"x-request-id": request_id})
