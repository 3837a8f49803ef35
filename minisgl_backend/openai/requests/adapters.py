"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM; without /v1, as in SGLang."""

from __future__ import annotations

from typing import Literal

from minisgl_backend.openai.requests.base import Model


class LoadRequest(Model):
    """POST /v1/load_lora_adapter."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False


class UnloadRequest(Model):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = ""
    lora_int_id: int | None = None  # names alone are known here, as vLLM finds it by its name


class SGLangLoadRequest(Model):
    """POST /load_lora_adapter."""

    lora_name: str
    lora_path: str
    pinned: Literal[False] = False  # slots take turns
    added_tokens_config: None = None


class SGLangUnloadRequest(Model):
    """POST /unload_lora_adapter."""

    lora_name: str
