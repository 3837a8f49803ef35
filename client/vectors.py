"""Embeddings and scores: requests to the server's model `embedding`, and its responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequest, ServerError
from .request import InferenceRequest, Tensor
from .results import Reply

MODEL = "embedding"


@dataclass(frozen=True)
class Embeddings:
    """One vector per text, in their order."""

    vectors: list[list[float]]
    num_input_tokens: int  # of all texts together
    num_cached_tokens: int  # of these, supplied by the prefix cache


def embedding_fields(
    texts: str | Sequence[str] | Sequence[int], dimensions: int | None, normalize: bool | None
) -> dict[str, Any]:
    """Raises InvalidRequest."""
    given: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    name = "texts"
    if given and all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        name, given = "token_ids", [given]
    elif not given or not all(isinstance(one, str) for one in given):
        raise InvalidRequest(f"texts is {texts!r:.60}; allowed: a text, several, or the token ids of one")
    fields = {name: given, "dimensions": dimensions, "normalize": normalize}
    return {key: value for key, value in fields.items() if value is not None}


def score_fields(query: str, documents: Sequence[str], instruction: str | None) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if isinstance(documents, str) or not documents:
        raise InvalidRequest(f"documents is {documents!r:.60}; allowed: a list of at least one text")
    fields = {"queries": [query], "documents": list(documents)}
    return fields if instruction is None else {**fields, "instruction": instruction}


def pooling_request(
    fields: Mapping[str, Any], request_id: str, timeout: float | None, priority: int
) -> InferenceRequest:
    """Raises InvalidRequest if it cannot be written as JSON."""
    values = {**fields, "priority": priority} if priority else fields
    try:
        text = json.dumps(values, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None
    return InferenceRequest(
        model=MODEL,
        model_version="",
        request_id=request_id,
        tensors={"pooling_request": Tensor("BYTES", (text,))},
        stream=False,
        timeout=timeout,
        batched=False,
    )


def embeddings_of(reply: Reply | None) -> Embeddings:
    """Raises ServerError if the response has none."""
    outputs = _outputs(reply)
    values, lengths = outputs["embedding"], outputs["prompt_lengths"]
    width = len(values) // len(lengths)
    vectors = [list(values[start : start + width]) for start in range(0, len(values), width)]
    return Embeddings(vectors, sum(lengths), sum(outputs["num_cached_tokens"]))


def scores_of(reply: Reply | None) -> list[float]:
    """Raises ServerError if the response has none."""
    return list(_outputs(reply)["score"])


def _outputs(reply: Reply | None) -> Mapping[str, Sequence[Any]]:
    if reply is None or not reply.outputs:
        raise ServerError("the server sent no answer")
    return reply.outputs
