"""Typed values of config.json, with the key's name in every error, and a record of which keys were read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError

_LONGEST_VALUE = 200  # characters of a value that a message repeats


class Keys:
    """A key that is absent or null has its default; a key without a default is required.

    All keys that a family asks for count as read; `known_keys.check_unread` checks the others.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults`: values of absent keys for which the caller gives no default."""
        self._defaults = defaults or {}
        self._values = {**self._defaults, **values}
        self._given = values
        self._read: set[str] = set()
        self._inner: dict[str, Any] = {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Keys:
        """The same keys, with a shared record of what was read and more defaults."""
        other = Keys(self._given, {**self._defaults, **defaults})
        other._read, other._inner = self._read, self._inner
        return other

    @property
    def given(self) -> Mapping[str, Any]:
        """All keys, as they are in the file."""
        return self._given

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, of any type."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is present, even if null."""
        self._read.add(key)
        return key in self._values

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._required(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            refuse(key, value, f"an integer, {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Above 0."""
        value = self._required(key, default)
        if not is_positive(value):
            refuse(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Above 0, or None where the key is absent."""
        return self.number(key) if self.get(key) is not None else None

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            refuse(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """One of a few values; the first of `allowed` where there is no default."""
        value = self.get(key, allowed[0] if default is None else default)
        if value not in allowed:
            refuse(key, value, ", ".join(json.dumps(option) for option in allowed))
        return value

    def sequence(self, key: str) -> Sequence[Any]:
        """A list; () where the key is absent."""
        value = self.get(key, ())
        if not isinstance(value, (list, tuple)):
            refuse(key, value, "a list")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object; {} where the key is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            refuse(key, value, "a JSON object")
        return value

    def without_effect(self, *keys: str) -> None:
        """Marks keys as read that do not change what this family computes, at least with the values read so far."""
        self._read.update(keys)

    def leave_unread(self, key: str, value: Any) -> None:
        """A key inside another key's object, `outer.inner`, that the caller does not read."""
        self._inner[key] = value

    def unread(self) -> dict[str, Any]:
        """All keys that were not read, with their values."""
        outer = {key: value for key, value in self._given.items() if key not in self._read and value is not None}
        return {**outer, **self._inner}

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config.json has no {key}")
        return value


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def refuse(key: str, value: Any, allowed: str) -> NoReturn:
    """Raises the ConfigError for a key of config.json whose value is not served."""
    raise ConfigError(refusal(key, value, allowed))


def refusal(key: str, value: Any, allowed: str) -> str:
    """The words of `refuse`."""
    text = json.dumps(value, default=str)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return f"config.json: {key} is {text}; allowed: {allowed}"
