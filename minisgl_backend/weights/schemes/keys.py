"""Values of config.json's quantization_config, with the key's whole path in every error, and which were read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError

PLAIN_INSTEAD = "or weights that are not quantized: take the model that these were made from"
_LONGEST_VALUE = 200  # characters of a value that a message repeats
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})


class SchemeKeys:
    """A JSON object. A key that is absent or null has its default. Whatever is asked for counts as read."""

    def __init__(self, values: Mapping[str, Any], path: str = "quantization_config") -> None:
        self.path = path
        self._values = values
        self._read: set[str] = set()

    @property
    def values(self) -> Mapping[str, Any]:
        """As they are, none of them read by that."""
        return self._values

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def choice(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """One of a few values; the first of `allowed` where there is no default."""
        value = self.get(key, allowed[0] if default is None else default)
        if not any(type(value) is type(option) and value == option for option in allowed):
            self.refuse(key, ", ".join(json.dumps(option) for option in allowed))
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(key, f"an integer, {least} or more")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of them; () where the key is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(key, "a list of strings")
        return tuple(value)

    def child(self, key: str) -> SchemeKeys | None:
        """The JSON object at a key; None where it is absent or empty."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "a JSON object")
        return SchemeKeys(value, f"{self.path}.{key}") if value else None

    def without_effect(self, *keys: str) -> None:
        """These keys change nothing that is computed: they tell how the checkpoint was made."""
        self._read.update(keys)

    def check_unread(self) -> None:
        """Raises ConfigError for a key that no reader asked for, unless its value says that it is not used."""
        for key, value in self._values.items():
            if key not in self._read and not any(value is one or value == one for one in _NEUTRAL):
                self.refuse(key, "absent: this engine does not know what it changes")

    def refuse(self, key: str, allowed: str) -> NoReturn:
        raise refusal(f"{self.path}.{key}", self._values.get(key), allowed)


def refusal(path: str, value: Any, allowed: str) -> ConfigError:
    text = json.dumps(value, default=str)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return ConfigError(f"config.json: {path} is {text}; allowed: {allowed}")
