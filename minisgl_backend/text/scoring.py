"""Scores how well documents answer a query: prompts for the engine, and scores from the returned vectors.

Three methods, by the model's kind: a classification head over the pair; the cosine of two embeddings; or, for a
generative model, the probability of "yes" against "no" as the next token, prompted like Qwen3-Reranker (Zhang et al.
2025, "Qwen3 Embedding").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from minisgl_backend.arrays import Float32Array
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import PoolingParams

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer

Scoring = Literal["head", "cosine", "yes_no"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"


def scoring_of(model: ModelConfig) -> Scoring:
    """The method for this model."""
    if model.num_labels:
        return "head"
    return "cosine" if model.embedding.is_embedding_model or not model.generates else "yes_no"


def embedding_params(
    model: ModelConfig, *, dimensions: int | None = None, normalize: bool | None = None, pooling: str | None = None
) -> PoolingParams:
    """The parameters of an embedding: the model's defaults, unless others are given. Raises InvalidRequestError."""
    defaults = model.embedding
    if defaults.not_served:
        raise InvalidRequestError(f"this model's embeddings are not served: {defaults.not_served}")
    if pooling is not None and pooling not in ("last", "mean", "cls"):
        raise InvalidRequestError(f"pooling is {pooling!r:.60}; allowed: last, mean, cls")
    params = PoolingParams(
        kind=pooling or defaults.kind,  # type: ignore[arg-type]
        normalize=defaults.normalize if normalize is None else normalize,
        dimensions=dimensions,
    )
    params.validate(model.hidden_size, model.vocab_size)
    return params


def pair_prompts(
    model: ModelConfig,
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None = None,
) -> tuple[list[list[int]], PoolingParams]:
    """Prompts whose vectors `scores` takes, and their pooling parameters. Raises InvalidRequestError.

    `queries`: one for all documents, or one for each.
    """
    way = scoring_of(model)
    if instruction is not None and way != "yes_no":
        raise InvalidRequestError("instruction is given; allowed: only for models that judge by yes and no")
    if way == "cosine":
        params = embedding_params(model, normalize=True)
        return [tokenizer.encode(text) for text in (*queries, *documents)], params
    if model.scores.not_served:
        raise InvalidRequestError(f"this model's scores are not served: {model.scores.not_served}")
    of_each = queries if len(queries) > 1 else [queries[0]] * len(documents)
    pairs = list(zip(of_each, documents, strict=True))
    if way == "head":
        if model.num_labels > 2:
            raise InvalidRequestError(f"documents: this model has {model.num_labels} labels; allowed: 1 or 2")
        return [tokenizer.encode_pair(*pair) for pair in pairs], PoolingParams(kind="scores")
    token_ids = tuple(tokenizer.first_token(word) for word in ("yes", "no"))
    texts = [_USER.format(instruction=instruction or INSTRUCTION, query=one, document=other) for one, other in pairs]
    return [_judged(tokenizer, text) for text in texts], PoolingParams(kind="token_logprobs", token_ids=token_ids)


def scores(way: Scoring, vectors: Sequence[Float32Array], num_queries: int, *, raw: bool = False) -> Float32Array:
    """One score per document, 0 to 1 (cosines: -1 to 1); float32 [num_documents]. `vectors`: of `pair_prompts`.

    `raw`: before the logistic function, any number; a cosine does not have one.
    """
    if way == "cosine":
        queries, documents = np.stack(vectors[:num_queries]), np.stack(vectors[num_queries:])
        return (queries * documents).sum(axis=1, dtype=np.float32)
    rows = np.stack(vectors).astype(np.float64)
    if way == "head" and rows.shape[1] == 1:
        positive, negative = rows[:, 0], np.zeros(len(rows))
    elif way == "head":
        positive, negative = rows[:, 1], rows[:, 0]
    else:
        positive, negative = rows[:, 0], rows[:, 1]
    if raw:
        return (positive - negative).astype(np.float32)
    # The softmax of two values is the logistic function of their difference, here without overflow.
    return np.exp(-np.logaddexp(0.0, negative - positive)).astype(np.float32)


def _judged(tokenizer: Tokenizer, text: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{_SYSTEM}\n{text}\nAnswer: ")
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.render(messages, enable_thinking=False), add_special_tokens=False)
