"""The routes of vLLM and SGLang that load and unload adapters: for whoever has the admin key, which an API key is not.

The key travels with the command and is compared where that is carried out, in the process of Triton's model `engine`.
The supervisor knows it, and tritonserver and its Python models have it in their environments. Engine cores, their
followers, grammar compilers and the endpoint's processes start without it; the latter see what a client sends.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import ValidationError
from starlette.responses import Response

from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.adapters import (
    LoadRequest,
    SGLangLoadRequest,
    SGLangUnloadRequest,
    UnloadRequest,
)
from minisgl_backend.openai.requests.base import Model
from minisgl_backend.openai.validation import from_validation

VLLM_LOAD, VLLM_UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SGLANG_LOAD, SGLANG_UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
PATHS = (VLLM_LOAD, VLLM_UNLOAD, SGLANG_LOAD, SGLANG_UNLOAD)
MAX_BODY_BYTES = 65536
Body = TypeVar("Body", bound=Model)


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post(VLLM_LOAD)
    async def load(request: Request) -> Response:
        body = await _body(endpoint, request, LoadRequest)
        command = {"command": "load_adapter", "name": body.lora_name, "path": body.lora_path}
        found = await _run(endpoint, request, {**command, "replace": body.load_inplace})
        if not (body.lora_name and body.lora_path):
            raise invalid(None, "Both 'lora_name' and 'lora_path' must be provided.")
        if found["code"] == "already_loaded":
            raise invalid(
                "lora_name",
                f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
            )
        _check(found)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post(VLLM_UNLOAD)
    async def unload(request: Request) -> Response:
        body = await _body(endpoint, request, UnloadRequest)
        found = await _run(endpoint, request, {"command": "unload_adapter", "name": body.lora_name})
        if not body.lora_name:
            raise invalid("lora_name", "'lora_name' needs to be provided to unload a LoRA adapter.")
        if found["code"] == "not_found":
            raise ApiError(404, f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name")
        _check(found)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post(SGLANG_LOAD)
    async def load_as_sglang(request: Request) -> Response:
        body = await _body(endpoint, request, SGLangLoadRequest)
        command = {"command": "load_adapter", "name": body.lora_name, "path": body.lora_path}
        found = await _run(endpoint, request, command)
        return _as_sglang(found, {"already_loaded": f"LoRA with name {body.lora_name} already exists."})

    @app.post(SGLANG_UNLOAD)
    async def unload_as_sglang(request: Request) -> Response:
        body = await _body(endpoint, request, SGLangUnloadRequest)
        found = await _run(endpoint, request, {"command": "unload_adapter", "name": body.lora_name})
        return _as_sglang(found, {"not_found": f"LoRA with name {body.lora_name} does not exist."})


async def _body(endpoint: Endpoint, request: Request, kind: type[Body]) -> Body:
    """Who has not the key is told so, whatever else is wrong. Raises ApiError."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        await _run(endpoint, request, {"command": "list_adapters"})
        raise from_validation(error.errors()) from None


async def _run(endpoint: Endpoint, request: Request, command: dict[str, Any]) -> dict[str, Any]:
    """What the command was answered with. Raises ApiError where the key is wrong."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    # The engine may know the model by another name.
    name, taken = command.get("name"), command.get("name") in await endpoint.model.names()
    asked = {"command": "list_adapters"} if taken else command
    found = await endpoint.triton.control(asked, key.strip() if scheme.lower() == "bearer" else "")
    if found["status"] == 401:
        raise ApiError(401, found["message"], code="invalid_admin_key")
    if taken:
        raise invalid("lora_name", f"The lora adapter name '{name}' conflicts with a served base model.")
    endpoint.model.forget()
    return found


def _check(found: dict[str, Any]) -> None:
    """Raises ApiError unless the command succeeded."""
    if not found["success"]:
        raise ApiError(found["status"], found["message"], code=found["code"])


def _as_sglang(found: dict[str, Any], messages: dict[str, str]) -> Response:
    """`messages`: SGLang's, by code."""
    message = "" if found["success"] else messages.get(found["code"], found["message"])
    answer = {"success": found["success"], "error_message": message, "loaded_adapters": found["adapters"]}
    status = found["status"] if found["success"] or found["status"] in (403, 503) else 400
    return json_response(answer, status)
