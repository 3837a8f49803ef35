"""POST /embed, and /rerank with `texts`: the format of text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.pooling import (
    Dimensions,
    EmbeddingInput,
    EmbeddingRequest,
    Inputs,
    Pooled,
    RerankRequest,
)


class TeiRequest(Pooled):
    """The fields of both."""

    truncate: bool | None = None  # longer texts are cut to the model's limit
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None  # the side that is cut

    def _common(self) -> dict[str, Any]:
        """The fields of `Pooled` in the other formats. Raises ApiError."""
        name, direction = "truncation_direction", self.truncation_direction
        if self.truncate and direction in ("Left", "left"):
            raise invalid(name, f"{name} is {direction!r}; allowed: 'Right'")
        common = {name: getattr(self, name) for name in Pooled.model_fields}
        return common | {"truncate_prompt_tokens": -1} if self.truncate else common


class TeiEmbedRequest(TeiRequest):
    """POST /embed. The answer is a list of vectors."""

    inputs: EmbeddingInput
    normalize: bool | None = None  # absent: true, whatever the model's own way is
    dimensions: Dimensions | None = None

    def to_fields(self) -> dict[str, Any]:
        """The request to the model `embedding`. Raises ApiError."""
        values: dict[str, Any] = {"normalize": self.normalize is not False, "dimensions": self.dimensions}
        try:
            return EmbeddingRequest.model_construct(input=self.inputs, **values | self._common()).to_fields()
        except ApiError as error:
            raise error.renamed({"input": "inputs"}) from None

    def names(self) -> dict[str, str]:
        """The server's name of a field -> the client's."""
        return {"texts": "inputs", "token_ids": "inputs"}


class TeiRerankRequest(TeiRequest):
    """POST /rerank with `texts`. The answer is a list of scores, the best first."""

    query: str
    texts: Inputs
    raw_scores: bool | None = None
    return_text: bool | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None  # beyond TEI, as clients of several services send it; 0: all

    def to_fields(self) -> dict[str, Any]:
        """The request to the model `embedding`. Raises ApiError."""
        values: dict[str, Any] = {"documents": self.texts, "use_activation": not self.raw_scores}
        try:
            return RerankRequest.model_construct(query=self.query, **values | self._common()).to_fields()
        except ApiError as error:
            raise error.renamed({"documents": "texts"}) from None

    def names(self) -> dict[str, str]:
        return {"queries": "query", "documents": "texts"}


def _of_its_shape(body: Any) -> RerankRequest | TeiRerankRequest:
    has_texts = isinstance(body, Mapping) and body.get("texts") is not None
    if has_texts and body.get("documents") is not None:
        raise invalid("texts", "texts is given together with documents; allowed: one of them")
    return (TeiRerankRequest if has_texts else RerankRequest).model_validate(body)


AnyRerankRequest = Annotated[RerankRequest | TeiRerankRequest, PlainValidator(_of_its_shape)]
