"""Shared parts of command lines: engine options as flags, and argument types. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from minisgl_backend.config import OPTIONS
from minisgl_backend.host.repository import parse_options

INFER_HELP = "also the model `infer`: whole answers for Triton's plain infer, by one more process of the server"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every engine option, and the model as the only positional argument; see `given_parameters`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="short for --model MODEL")
    group = parser.add_argument_group("engine options", "each is also a parameter of engine/config.pbtxt")
    for name, option in OPTIONS.items():
        text = f"{option.help} (allowed: {option.allowed}) [{'unset' if option.default is None else option.default}]"
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
        help_text = argparse.SUPPRESS if option.internal else text.replace("%", "%%")
        group.add_argument(*option.flags, dest=name, metavar="VALUE", help=help_text, **optional)


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
