"""Prompts as given by callers of `LLM` -> texts and lists of token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl_backend.errors import InvalidRequestError

_ALLOWED = (
    "a text, token ids (a list, or an array or tensor of one dimension), {'prompt': text} or "
    "{'prompt_token_ids': token ids}, or several of these"
)
_KEYS = ("prompt", "prompt_token_ids")


def listed(prompts: Any) -> list[str | list[int]]:
    """One prompt, or any iterable of several, as a list. Raises InvalidRequestError for what is not a prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [_prompt(prompts)]
    given = _as_list(prompts)
    if given and not isinstance(given[0], (str, Iterable)):
        return [_token_ids(given)]
    return [_prompt(one) for one in given]


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return _of_mapping(given)
    return _token_ids(_as_list(given))


def _of_mapping(given: Mapping[str, Any]) -> str | list[int]:
    """A prompt in vLLM's format; token ids take precedence over the text that they were made from."""
    named = {key: value for key, value in given.items() if value is not None}
    unknown = [key for key, value in named.items() if key not in _KEYS and value]
    if unknown:
        raise InvalidRequestError(f"the prompt has {unknown[0]!r}; allowed: {' or '.join(_KEYS)}")
    for key in reversed(_KEYS):
        if key in named:
            return _prompt(named[key]) if not isinstance(named[key], Mapping) else _refuse(named[key])
    raise InvalidRequestError(f"the prompt is {dict(given)!r}; allowed: an object with {' or '.join(_KEYS)}")


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
