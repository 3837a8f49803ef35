"""POST /v1/batches and /v1/messages/batches, and the lines of a batch's file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator

from minisgl_backend.openai.requests.base import Model, is_unicode

MAX_LINES = 50_000
MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 24 * 3600  # allowed lifetime of a file in seconds; OpenAI's
_MAX_METADATA = 16
_MAX_METADATA_TEXT = 512
_NOT_IN_A_LINE = ("stream", "background", "priority")
MESSAGES = "/v1/messages"
MAX_MESSAGE_LINES = 100_000  # of a batch of messages; Anthropic's
_MESSAGE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # Anthropic's form of a custom_id


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
    _check_fields("body", line.body)
    return line


def _check_fields(name: str, body: dict[str, Any]) -> None:
    for key in _NOT_IN_A_LINE:
        if body.get(key):
            raise ValueError(f"{name}.{key} is given; allowed in a batch: none")


class MessageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch of messages."""

    custom_id: str
    params: msgspec.Raw  # a JSON object


class MessageBatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/messages/batches."""

    requests: list[MessageEntry]


_decode_body = msgspec.json.Decoder(MessageBatchBody).decode
_decode_params = msgspec.json.Decoder(dict[str, Any]).decode


def message_lines(body: bytes, max_bytes: int) -> list[bytes]:
    """The requests of a batch of messages as lines of a batch's file, each of at most `max_bytes`. Raises ValueError
    with what is wrong."""
    try:
        requests = _decode_body(body).requests
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"requests: {error}") from None
    if not 1 <= len(requests) <= MAX_MESSAGE_LINES:
        raise ValueError(f"requests has {len(requests)} entries; allowed: 1 to {MAX_MESSAGE_LINES}")
    return list(_message_lines(requests, max_bytes))


def _message_lines(requests: list[MessageEntry], max_bytes: int) -> Iterator[bytes]:
    seen: set[str] = set()
    for number, entry in enumerate(requests):
        name = f"requests[{number}]"
        if not _MESSAGE_ID.fullmatch(entry.custom_id):
            raise ValueError(f"{name}.custom_id is {entry.custom_id[:70]!r}; allowed: 1 to 64 letters, digits, _ and -")
        if entry.custom_id in seen:
            raise ValueError(f"{name}.custom_id is {entry.custom_id!r}, as that of another request")
        seen.add(entry.custom_id)
        try:
            _check_fields(f"{name}.params", _decode_params(entry.params))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ValueError(f"{name}.params: {error}") from None
        # In JSON, ends of lines stand between values alone.
        params = msgspec.Raw(bytes(entry.params).replace(b"\n", b" ").replace(b"\r", b" "))
        line = {"custom_id": entry.custom_id, "method": "POST", "url": MESSAGES, "body": params}
        if len(encoded := msgspec.json.encode(line)) >= max_bytes:
            raise ValueError(f"{name} is longer than {max_bytes} bytes, all that one may have (--max-body-bytes)")
        yield encoded + b"\n"
