"""POST /v1/embeddings, /v1/rerank and /v1/score: requests whose answers are vectors or scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Model, Named, TokenIds, check_unicode, given
from minisgl_backend.request import MAX_PRIORITY

MAX_INPUTS = 2048
_MAX_TOKENS = 2**31 - 1
Inputs = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
EmbeddingInput = str | Inputs | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True)]
Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY)]
Truncation = Annotated[int, Field(ge=-1, le=_MAX_TOKENS)]
Dimensions = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]


class Pooled(Named):
    """The fields of all of them."""

    truncate_prompt_tokens: Truncation | None = None  # vLLM's: truncates longer prompts; -1: to the model's limit
    priority: Priority | None = None
    cache_salt: str | None = None  # cached prefixes are shared only among requests with the same salt

    def _common_fields(self) -> dict[str, Any]:
        check_unicode("cache_salt", self.cache_salt)
        return given(most_tokens=self.truncate_prompt_tokens, priority=self.priority, cache_salt=self.cache_salt)


class EmbeddingRequest(Pooled):
    """POST /v1/embeddings."""

    input: EmbeddingInput
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    # Beyond OpenAI.
    normalize: bool | None = None
    pooling: Literal["last", "mean", "cls"] | None = None

    def to_fields(self) -> dict[str, Any]:
        """The request to the model `embedding`. Raises ApiError."""
        items: Sequence[Any] = [self.input] if isinstance(self.input, str) else self.input
        if not items:
            raise invalid("input", "input is empty; allowed: a text, token ids, or a list of either")
        name = "texts"
        if not isinstance(items[0], str):
            name, items = "token_ids", [items] if isinstance(items[0], int) else items
            if any(not -(2**31) <= token < 2**31 for ids in items for token in ids):
                raise invalid("input", "input has a number that is no token id; allowed: the model's token ids")
        else:
            check_unicode("input", items)
        options = given(dimensions=self.dimensions, normalize=self.normalize, pooling=self.pooling)
        return {name: items, **options, **self._common_fields()}

    def names(self) -> dict[str, str]:
        """The server's name of a field -> the client's."""
        return {"texts": "input", "token_ids": "input"}


class DocumentObject(Model):
    text: str


Document = str | DocumentObject
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class RerankRequest(Pooled):
    """POST /v1/rerank, /rerank and /v2/rerank: Jina's and Cohere's format."""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all, as in vLLM
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    instruction: str | None = None  # the task, for models that judge by yes and no
    use_activation: bool | None = None  # vLLM's; false: scores as they are before the logistic function

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def to_fields(self) -> dict[str, Any]:
        """The request to the model `embedding`. Raises ApiError."""
        for name, value in (("query", self.query), ("documents", self.texts), ("instruction", self.instruction)):
            check_unicode(name, value)
        options = given(
            instruction=self.instruction,
            most_document_tokens=self.max_tokens_per_doc,
            raw_scores=True if self.use_activation is False else None,
        )
        return {"queries": [self.query], "documents": self.texts, **options, **self._common_fields()}

    def names(self) -> dict[str, str]:
        return {"queries": "query", "most_document_tokens": "max_tokens_per_doc"}


class ScoreRequest(Pooled):
    """POST /v1/score and /score: vLLM's format; one text against many, or n texts against n."""

    text_1: str | Inputs
    text_2: str | Inputs
    instruction: str | None = None
    use_activation: bool | None = None

    def to_fields(self) -> dict[str, Any]:
        """The request to the model `embedding`. Raises ApiError."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) not in (1, len(second)):
            raise invalid("text_1", f"text_1 has {len(first)} entries; allowed: 1, or {len(second)} as text_2 has")
        for name, value in (("text_1", first), ("text_2", second), ("instruction", self.instruction)):
            check_unicode(name, value)
        raw_scores = True if self.use_activation is False else None
        options = given(instruction=self.instruction, raw_scores=raw_scores)
        return {"queries": first, "documents": second, **options, **self._common_fields()}

    def names(self) -> dict[str, str]:
        return {"queries": "text_1", "documents": "text_2"}
