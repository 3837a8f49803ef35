"""Prompts as given by callers of `LLM` -> texts and lists of token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequestError

_ALLOWED = (
    "a text, token ids (a list, or an array or tensor of one dimension), {'prompt': text} or "
    "{'prompt_token_ids': token ids}, or several of these"
)
_KEYS = ("prompt", "prompt_token_ids")
_MODALITIES, _OPTIONS, _UUIDS = "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"
_IMAGE_KEYS = (_MODALITIES, _OPTIONS, _UUIDS)


@dataclass(frozen=True)
class PromptWithImages:
    """A prompt in vLLM's format, with what belongs to its images as given."""

    prompt: str | list[int]
    images: Any
    options: Mapping[str, Any] | None
    uuids: Any


GivenPrompt = str | list[int] | PromptWithImages


def listed(prompts: Any) -> list[GivenPrompt]:
    """One prompt, or any iterable of several, as a list. Raises InvalidRequestError for what is not a prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [_prompt(prompts)]
    given = _as_list(prompts)
    if given and not isinstance(given[0], (str, Iterable)):
        return [_token_ids(given)]
    return [_prompt(one) for one in given]


def adapter_names(given: Any, count: int) -> list[tuple[str | None, str]]:
    """What vLLM's `lora_request` names, and the folder that it says, or "": one for all of `count` prompts, or one for
    each, as a name or an object that has both (`lora_name`, `lora_path`); None: the model itself. Raises
    InvalidRequestError."""
    each = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(each) != count:
        raise InvalidRequestError(
            f"lora_request has {len(each)} entries; allowed: one, or one for each of {count} prompts"
        )
    names = [one if one is None or isinstance(one, str) else getattr(one, "lora_name", one) for one in each]
    if wrong := [one for one in names if not (one is None or isinstance(one, str))]:
        raise InvalidRequestError(f"lora_request is {wrong[0]!r:.60}; allowed: an adapter's name, or a LoRARequest")
    return [(name, str(getattr(one, "lora_path", None) or "")) for name, one in zip(names, each, strict=True)]


def _prompt(given: Any) -> GivenPrompt:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return _of_mapping(given)
    return _token_ids(_as_list(given))


def _of_mapping(given: Mapping[str, Any]) -> GivenPrompt:
    """A prompt in vLLM's format; token ids take precedence over the text that they were made from."""
    named = {key: value for key, value in given.items() if value is not None}
    unknown = [key for key, value in named.items() if key not in (*_KEYS, *_IMAGE_KEYS) and value]
    if unknown:
        raise InvalidRequestError(f"the prompt has {unknown[0]!r}; allowed: {' or '.join(_KEYS)}, {_MODALITIES}")
    for key in reversed(_KEYS):
        if key in named:
            prompt = _prompt(named[key]) if not isinstance(named[key], Mapping) else _refuse(named[key])
            return _with_images(prompt, named) if named.get(_MODALITIES) else prompt
    raise InvalidRequestError(f"the prompt is {dict(given)!r}; allowed: an object with {' or '.join(_KEYS)}")


def _with_images(prompt: Any, named: Mapping[str, Any]) -> GivenPrompt:
    data, uuids = named[_MODALITIES], named.get(_UUIDS) or {}
    for key, value in ((_MODALITIES, data), (_UUIDS, uuids)):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"the prompt's {key} is {value!r:.60}; allowed: an object with `image`")
        if other := next((kind for kind, one in value.items() if kind != "image" and one is not None), None):
            raise InvalidRequestError(f"the prompt's {key} has {other!r}; allowed: image")
    images = data.get("image")
    if images is None:
        return prompt  # type: ignore[no-any-return]
    return PromptWithImages(prompt, images, named.get(_OPTIONS), uuids.get("image"))


def _as_list(given: Any) -> list[Any]:
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        _refuse(given)
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _token_ids(values: list[Any]) -> list[int]:
    if all(type(one) is int for one in values):
        return values
    return [_token_id(one) for one in values]


def _token_id(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"the prompt holds {value!r:.60}; allowed: whole numbers, as token ids") from None


def _refuse(given: Any) -> Any:
    raise InvalidRequestError(f"the prompt is {given!r:.60}; allowed: {_ALLOWED}")
