"""POST /v1/batches, and the lines of a batch's file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator

from minisgl_backend.openai.requests.base import Model, is_unicode

MAX_LINES = 50_000
MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 24 * 3600  # allowed lifetime of a file in seconds; OpenAI's
_MAX_METADATA = 16
_MAX_METADATA_TEXT = 512
_NOT_IN_A_LINE = ("stream", "background", "priority")


class ExpiresAfter(Model):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME, le=MAX_LIFETIME)]


class BatchRequest(Model):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, values: dict[str, str] | None) -> dict[str, str] | None:
        if values is not None and (
            len(values) > _MAX_METADATA
            or any(len(key) > _MAX_METADATA_TEXT or len(text) > _MAX_METADATA_TEXT for key, text in values.items())
            or not is_unicode(values)
        ):
            raise ValueError(f"{_MAX_METADATA} Unicode texts of at most {_MAX_METADATA_TEXT} characters")
        return values


class Line(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


_decode = msgspec.json.Decoder(Line).decode


def parse_line(text: bytes, endpoint: str) -> Line:
    """Raises ValueError with what is wrong."""
    try:
        line = _decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if line.method != "POST":
        raise ValueError(f"method is {line.method[:60]!r}; allowed: POST")
    if line.url != endpoint:
        raise ValueError(f"url is {line.url[:60]!r}; allowed: {endpoint}, the batch's endpoint")
    if not 1 <= len(line.custom_id) <= _MAX_METADATA_TEXT:
        raise ValueError(f"custom_id has {len(line.custom_id)} characters; allowed: 1 to {_MAX_METADATA_TEXT}")
    for name in _NOT_IN_A_LINE:
        if line.body.get(name):
            raise ValueError(f"body.{name} is given; allowed in a batch: none")
    return line
