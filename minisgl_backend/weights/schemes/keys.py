"""Values of what a checkpoint says of its quantization, with the key's whole path in every error, and which were
read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.schemes.how_made import HOW_IT_WAS_MADE, NUMBERS_CHANGE

PLAIN_INSTEAD = "or weights that are not quantized: take the model that these were made from"
CONFIG_JSON = "config.json: quantization_config"
_LONGEST_VALUE = 200  # characters of a value that a message repeats
_INTEGER = re.compile(r"-?\d{1,9}")
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})


class SchemeKeys:
    """A JSON object. A key that is absent or null has its default. Whatever is asked for counts as read."""

    def __init__(self, values: Mapping[str, Any], path: str = CONFIG_JSON) -> None:
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

    def word(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """`choice`, whatever the case of its letters."""
        value = self.get(key, allowed[0] if default is None else default)
        if not isinstance(value, str) or value.lower() not in allowed:
            self.refuse(key, ", ".join(json.dumps(option) for option in allowed))
        return value.lower()

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Any integer, also as text, as it is in some files. None where the key is absent and has no default."""
        value = self.get(key, default)
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            return int(value)
        if value is not None and type(value) is not int:
            self.refuse(key, "an integer")
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
        """Raises ConfigError for a key that no reader asked for, unless it only tells how the checkpoint was made, or
        its value says that it is not used."""
        for key, value in self._values.items():
            if key in self._read or key in HOW_IT_WAS_MADE or _is_neutral(value):
                continue
            neutral, what = NUMBERS_CHANGE.get(key, ((), None))
            if value not in neutral:
                allowed = ", ".join([*(json.dumps(one) for one in neutral), "absent"])
                self.refuse(key, f"{allowed}: {what or 'this engine does not know what it changes'}")

    def refuse(self, key: str, allowed: str) -> NoReturn:
        raise refusal(f"{self.path}.{key}", self._values.get(key), allowed)


def _is_neutral(value: Any) -> bool:
    """Of a key, or of all keys of an object."""
    return value in _NEUTRAL or (isinstance(value, dict) and all(one in _NEUTRAL for one in value.values()))


def refusal(path: str, value: Any, allowed: str) -> ConfigError:
    text = json.dumps(value, default=str)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return ConfigError(f"{path} is {text}; allowed: {allowed}")
