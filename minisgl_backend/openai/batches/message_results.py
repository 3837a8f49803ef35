"""The results of a batch of messages, one line for each request, in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minisgl_backend.openai.batches.batches import Batch
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError, anthropic_error

# What becomes of requests that nobody answered, by how the batch ended.
_REST = {"cancelled": "canceled", "expired": "expired"}


class LineAnswer(NamedTuple):
    """The response to the request in a line of a batch."""

    status: int
    request_id: str
    body: bytes  # JSON in one line. It stays as it is: halves of surrogate pairs and huge numbers survive no decoder


def message_result(custom_id: str, answer: LineAnswer | None) -> dict[str, Any]:
    """A line of the results. `answer`: None if the batch has expired."""
    if answer is None:
        return _result(custom_id, "expired")
    body = msgspec.Raw(answer.body)
    return (
        _result(custom_id, "succeeded", message=body)
        if answer.status < 400
        else _result(custom_id, "errored", error=body)
    )


def _result(custom_id: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "result": {"type": kind, **more}}


def no_counts() -> dict[str, int]:
    """The types of results, and that there are none."""
    return dict.fromkeys(("succeeded", "errored", "canceled", "expired"), 0)


def write_results(batch: Batch, status: str, files: FileStore) -> dict[str, int]:
    """Makes the file of all results of a batch that ends with `status`: those in its files, and those of the other
    requests. Returns how many there are of each type."""
    counts = no_counts()
    seen: set[str] = set()
    kind = _REST.get(status, "errored")
    more = {} if status in _REST else {"error": _failure(batch)}
    with files.data(batch["_results"]).open("wb") as file:
        for part in ("_output", "_errors"):
            for text in _lines(files.data(batch[part])):
                found = json.loads(text)
                seen.add(found["custom_id"])
                counts[found["result"]["type"]] += 1
                file.write(text)
        for text in _lines(files.data(batch["input_file_id"])):
            if (custom_id := json.loads(text)["custom_id"]) not in seen:
                counts[kind] += 1
                file.write(encode(_result(custom_id, kind, **more)) + b"\n")
    return counts


def unseen_files(batch: Batch) -> set[str]:
    """The ids of its files, which no client of the files' API sees."""
    return {batch[key] for key in ("input_file_id", "_output", "_errors", "_results")}


def remove_parts(batch: Batch, files: FileStore) -> None:
    """Removes what the results have been made of."""
    for file_id in unseen_files(batch) - {batch["_results"]}:
        files.delete(file_id)


def _lines(path: Path) -> Iterator[bytes]:
    """The file's lines; a last one that was cut off by a crash is left out."""
    if path.exists():
        with path.open("rb") as file:
            yield from (text for text in file if text.endswith(b"\n"))


def _failure(batch: Batch) -> dict[str, Any]:
    errors = (batch["errors"] or {}).get("data") or [{"message": "the request was not answered"}]
    return anthropic_error(ApiError(500, errors[0]["message"]))
