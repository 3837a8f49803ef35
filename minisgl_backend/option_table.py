"""Options as tables: each is a field of a frozen dataclass, declared once with its meaning and what it allows.

`EngineConfig`, `ServerSettings` and `EndpointSettings` are such tables. `host.options.arguments` makes a command line
of one, `host.options.commands` the options of a command of typer's. Standard library only.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.errors import ConfigError

_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Argument:
    """How a command line takes an option's value. Without one, the value stays text that `Option.parse` reads later."""

    flag: str = ""  # its spelling; "": the field's name
    metavar: str | None = None  # None: its choices, or nothing for a switch
    reads: Callable[[str], Any] | None = None  # raises argparse.ArgumentTypeError; None: text
    choices: tuple[str, ...] | None = None
    default: str | None = None  # what help says of it; "": nothing; None: the value


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of a table."""

    name: str
    type: type  # str, int, float, bool or Path: of each value where there are many
    many: bool  # a tuple of values
    optional: bool  # None is allowed, and written as an empty parameter
    default: Any
    help: str
    flags: tuple[str, ...]  # command-line spellings, the first one is canonical
    allowed: str  # description of allowed values, for error messages
    check: Callable[[Any], bool]
    internal: bool  # for benchmarks and tests: accepted everywhere, but not documented
    argument: Argument | None
    reads: Callable[[str], Any] | None = None  # the value of a text, raising ValueError; None: `type`

    @property
    def label(self) -> str:
        """What messages call it: an option that is also a parameter of files by its name."""
        return self.name if self.argument is None else self.flags[0]

    @property
    def dest(self) -> str:
        """Its name among the values of a command line."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def shown_default(self) -> str:
        """The default, as help writes it."""
        if self.argument is not None and self.argument.default is not None:
            return self.argument.default
        if self.default is None:
            return "unset"
        return str(self.default).lower() if self.type is bool else str(self.default) or "none"

    def parse(self, text: str) -> Any:
        """The value that `text` stands for. Raises ConfigError naming the option, the text and what is allowed."""
        text = text.strip()
        if self.optional and text.lower() in ("", "none", "auto") and self.default is None:
            return None
        try:
            value = _SWITCHES[text.lower()] if self.type is bool else (self.reads or self.type)(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{self.label} is {text!r}; allowed: {self.allowed}") from None
        return self.validate(value)

    def validate(self, value: Any) -> Any:
        """Returns the value. Raises ConfigError if it is not allowed."""
        if value is None and self.optional:
            return value
        for one in value if self.many else (value,):
            right_type = isinstance(one, self.type) or (self.type is float and isinstance(one, int))
            if not right_type or (self.type is not bool and isinstance(one, bool)) or not self.check(one):
                raise ConfigError(f"{self.label} is {one!r}; allowed: {self.allowed}")
        return value


def anything(_: Any) -> bool:
    """Allows every value of the type."""
    return True


def at_least(least: float) -> Callable[[Any], bool]:
    """Allows numbers from `least` on."""
    return lambda value: bool(value >= least)


def between(least: float, most: float) -> Callable[[Any], bool]:
    """Allows numbers from `least` to `most`, both included."""
    return lambda value: bool(least <= value <= most)


def option(
    default: Any,
    help: str,
    allowed: str = "",
    check: Callable[[Any], bool] = anything,
    *flags: str,
    internal: bool = False,
    secret: bool = False,
    argument: Argument | None = None,
    reads: Callable[[str], Any] | None = None,
) -> Any:
    """A field of a table; see `Option`. `flags`: further spellings beside the field's name; `secret`: repr hides it."""
    row = {
        "help": help,
        "allowed": allowed,
        "check": check,
        "flags": flags,
        "internal": internal,
        "argument": argument,
        "reads": reads,
    }
    return field(default=default, metadata=row, repr=not secret)


def one_of(
    default: str | None, help: str, choices: tuple[str, ...], *flags: str, argument: Argument | None = None
) -> Any:
    """A field whose value is one of these words."""
    return option(default, help, ", ".join(choices), choices.__contains__, *flags, argument=argument)


def check_all(settings: Any, table: Mapping[str, Option]) -> None:
    """Raises ConfigError for the first option of `settings` whose value is not allowed."""
    for row in table.values():
        row.validate(getattr(settings, row.name))


def options_of(table: type) -> Mapping[str, Option]:
    """The rows of a dataclass, by name; fields that `option` did not make are none."""
    hints = typing.get_type_hints(table)
    rows = (spec for spec in dataclasses.fields(table) if "allowed" in spec.metadata)
    return types.MappingProxyType({spec.name: _row(spec, hints[spec.name]) for spec in rows})


def _row(spec: dataclasses.Field[Any], hint: Any) -> Option:
    parts = typing.get_args(hint)
    types_of_value = [part for part in parts or (hint,) if part not in (type(None), ...)]
    argument = spec.metadata["argument"]
    flag = argument.flag if argument is not None else ""
    flags = (flag or "--" + spec.name.replace("_", "-"), *spec.metadata["flags"])
    return Option(
        name=spec.name,
        type=types_of_value[0],
        many=typing.get_origin(hint) is tuple,
        optional=type(None) in parts,
        default=spec.default,
        **{**spec.metadata, "flags": flags},
    )
