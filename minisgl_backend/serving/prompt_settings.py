"""What a codec must know of model and configuration, and the checks of prompts by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.models.config import GenerationDefaults, ModelConfig
from minisgl_backend.request import check_prompt
from minisgl_backend.serving.fields import json_value, shown

MAX_MESSAGES = 10_000
MAX_PROMPT_BYTES = 1 << 20  # or 64 bytes per token of the context, if that is more


@dataclass(frozen=True)
class CodecSettings:
    """What the codec must know of model and configuration."""

    generation: GenerationDefaults  # the meaning of absent sampling fields
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_seq_len: int  # the engine may allow less if its KV cache does not hold one sequence of that length
    apply_chat_template: bool = False  # to text_input, unless the request says otherwise
    exclude_input_in_output: bool = True  # unless the request says otherwise
    generates: bool = True  # False: the model returns only vectors
    why_no_images: str = ""  # of a model that has an encoder of images, which is not served

    @classmethod
    def of_model(cls, model: ModelConfig, max_seq_len_override: int | None = None, **settings: Any) -> CodecSettings:
        """`settings` are the other fields. Raises ConfigError if the model is not served at that length."""
        return cls(
            generation=model.generation,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            max_seq_len=model.max_seq_len(max_seq_len_override),
            generates=model.generates,
            **settings,
        )

    def check_bytes(self, name: str, given: Any) -> None:
        limit = max(MAX_PROMPT_BYTES, 64 * self.max_seq_len)
        if _num_bytes(given) > limit:
            raise InvalidRequestError(
                f"{name} is longer than {limit} bytes; this model cannot take so long a prompt: prompt is too long, "
                f"this model's maximum context length is {self.max_seq_len} tokens"
            )

    def check_prompt(self, name: str, ids: Sequence[int] | Int32Array, limited_by: str = "") -> None:
        check_prompt(name, ids, vocab_size=self.vocab_size, max_seq_len=self.max_seq_len, limited_by=limited_by)


def listed_messages(given: str | list[Any]) -> list[Any]:
    """A list of messages, or one as JSON text."""
    messages = json_value("messages", given) if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages is {shown(given)}; allowed: a JSON list of at least one chat message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages has {len(messages)} entries; allowed: at most {MAX_MESSAGES}")
    return messages


def _num_bytes(given: Any) -> int:
    return len(given.encode()) if isinstance(given, str) else len(msgspec.json.encode(given))
