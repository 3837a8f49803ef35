"""The table of the endpoint's routes: a row for each file of them.

A new file of routes needs a row here and nothing else (docs/adding_an_endpoint.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.batches.files import MAX_FILE_BYTES
from minisgl_backend.openai.batches.message_batches import PATH as MESSAGE_BATCHES
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.routes import (
    adapters,
    batches,
    chat,
    completions,
    decisions,
    files,
    message_batches,
    messages,
    models,
    pooling,
    responses,
    server,
    tokenize,
)


@dataclass(frozen=True)
class Family:
    """The routes of one file, and what is to be known of them before a request reaches them."""

    add_routes: Callable[[FastAPI, Endpoint], None]
    is_served: Callable[[EndpointSettings], bool] = lambda settings: True
    # gen_ai.operation.name of spans by path, by OpenTelemetry's names; all others below /v1/ are chats.
    operations: Mapping[str, str] = field(default_factory=dict)
    open_paths: Sequence[str] = ()  # need no API key; one that ends in /* stands for all below it
    image_paths: Sequence[str] = ()  # may have images in messages: larger bodies
    body_limits: Mapping[str, int] = field(default_factory=dict)  # bytes by path, in place of --max-body-bytes


def _keeps_files(settings: EndpointSettings) -> bool:
    return bool(settings.max_files_bytes and settings.files_folder)


FAMILIES = (
    Family(chat.add_routes, image_paths=("/v1/chat/completions",)),
    Family(completions.add_routes, operations={"/v1/completions": "text_completion"}),
    Family(models.add_routes),
    Family(tokenize.add_routes, image_paths=("/tokenize",)),
    Family(server.add_routes, open_paths=server.OPEN_PATHS),
    Family(messages.add_routes, image_paths=("/v1/messages", "/v1/messages/count_tokens")),
    Family(responses.add_routes, image_paths=("/v1/responses",)),
    Family(pooling.add_routes, operations=pooling.OPERATIONS),
    Family(decisions.add_routes, operations={"/v1/decisions": "decisions"}),
    Family(
        adapters.add_routes,
        lambda settings: settings.takes_commands,
        open_paths=adapters.PATHS,  # the admin key is no API key
        body_limits=dict.fromkeys(adapters.PATHS, adapters.MAX_BODY_BYTES),
    ),
    Family(files.add_routes, _keeps_files, body_limits={files.PATH: MAX_FILE_BYTES}),
    Family(batches.add_routes, _keeps_files),
    Family(message_batches.add_routes, _keeps_files, body_limits={MESSAGE_BATCHES: MAX_FILE_BYTES}),
)
