"""Command lines of argparse's from tables of options, and types of their arguments. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from minisgl_backend.config import OPTIONS
from minisgl_backend.host.repository import parse_options
from minisgl_backend.option_table import Argument, Option

INFER_HELP = "also the model `infer`: whole answers for Triton's plain infer, by one more process of the server"


def add_options(group: argparse._ActionsContainer, table: Mapping[str, Option]) -> None:
    """Adds a flag for every option; `values_of` reads those that have an `Argument`, `given_parameters` the others."""
    for option in table.values():
        argument = option.argument
        how = _as_text(option) if argument is None else _as_value(option, argument)
        group.add_argument(*option.flags, **how)


def values_of(table: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the table's dataclass by the values of a command line."""
    found = {name: values[option.dest] for name, option in table.items()}
    return {name: tuple(value) if table[name].many else value for name, value in found.items()}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every engine option, and the model as the only positional argument; see `given_parameters`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="short for --model MODEL")
    add_options(parser.add_argument_group("engine options", "each is also a parameter of engine/config.pbtxt"), OPTIONS)


def given_parameters(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> dict[str, str]:
    """The given options, as parameters of engine/config.pbtxt.

    Raises ConfigError for a wrong value; exits with a message (SystemExit) if two models are named.
    """
    given = {name: values[name] for name in OPTIONS if values[name] is not None}
    if values["model_argument"] is not None:
        if "model" in given:
            parser.error(f"two models: {values['model_argument']} and --model {given['model']}")
        given["model"] = values["model_argument"]
    return parse_options(given)


def _as_text(option: Option) -> dict[str, Any]:
    text = f"{option.help} (allowed: {option.allowed}) [{'unset' if option.default is None else option.default}]"
    optional: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
    return {
        "dest": option.name,
        "metavar": "VALUE",
        "help": argparse.SUPPRESS if option.internal else text.replace("%", "%%"),
        **optional,
    }


def _as_value(option: Option, argument: Argument) -> dict[str, Any]:
    shown = "" if option.type is bool else "[%(default)s]"
    shown = shown if argument.default is None else f"[{argument.default}]" if argument.default else ""
    how: dict[str, Any] = {"default": option.default, "help": f"{option.help} {shown}".strip()}
    if option.type is bool:
        return {**how, "action": "store_true"}
    if option.many and argument.reads is None:
        how["nargs"] = "+"
    return {**how, "type": argument.reads, "choices": argument.choices, "metavar": argument.metavar}


def tcp_port(text: str) -> int:
    """An argument type: a TCP port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 to 65535")
    return int(text)


def tcp_port_or_none(text: str) -> int:
    """An argument type: a TCP port, or 0 for no endpoint."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 to 65535, or 0 for no endpoint")
    return int(text)
