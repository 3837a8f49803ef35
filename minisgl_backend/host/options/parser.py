"""The commands' option parser, and the file that may contain options. Standard library and PyYAML only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from minisgl_backend.config import OPTIONS
from minisgl_backend.errors import ConfigError
from minisgl_backend.foreign_options import explain_unknown, is_foreign

_MAPPINGS = frozenset({"speculative_config"})  # JSON objects, which may be written as YAML mappings
_COMMAND_LINE_ONLY = ("--help", "--version", "--config")
_SWITCHES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


class YamlMissing(ConfigError):
    """The file cannot be read because PyYAML is not installed."""


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the equivalent of an unknown option, or the one that was meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else list(args)
        # Before missing arguments: a mistyped --out is not reported as a required one, nor -hf as -h.
        strange = [one for one in given if one.partition("=")[0] not in self._option_string_actions]
        self._refuse([one for one in strange if one.startswith("--") or (one.startswith("-") and is_foreign(one))])
        values, unknown = self.parse_known_args(given, namespace)
        self._refuse([one for one in unknown if one.startswith("-")])
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return values

    def _refuse(self, options: Sequence[str]) -> None:
        if options:
            self.error(explain_unknown(options[0], self.option_names(), options[1:]))

    def option_names(self) -> list[str]:
        """All options that --help shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings]


def set_defaults_from_file(parser: OptionParser, path: Path) -> frozenset[str]:
    """Makes the YAML file's values the parser's defaults: options by name, without the leading dashes.

    Returns the names of the options that it sets. Raises ConfigError naming the file, the line and what is allowed;
    YamlMissing if PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise YamlMissing(f"--config is {str(path)!r}, which needs PyYAML: pip install pyyaml") from None
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config is {str(path)!r}, which cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if root is None:
        return frozenset()
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: allowed: one option a line, as in page-size: 16")
    found: dict[str, Any] = {}
    for key, value in root.value:
        location = f"{path}:{key.start_mark.line + 1}"
        action = _action_of(parser, str(key.value), location)
        if action.dest in found:
            raise ConfigError(f"{location}: {key.value} is there twice")
        if action.dest in _MAPPINGS and isinstance(value, yaml.MappingNode):
            texts = [json.dumps(yaml.safe_load(yaml.serialize(value)))]
        else:
            texts = list(_texts(value, location))
        found[action.dest] = _value_of(parser, action, texts, location)
    parser.set_defaults(**found)
    return frozenset(found)


def _action_of(parser: OptionParser, key: str, location: str) -> argparse.Action:
    name = "--" + key.removeprefix("--").replace("_", "-")
    if name in _COMMAND_LINE_ONLY:
        raise ConfigError(f"{location}: {key} is for the command line")
    for action in parser._actions:
        if name in action.option_strings:
            return action
    known = [option for option in parser.option_names() if option not in _COMMAND_LINE_ONLY]
    raise ConfigError(f"{location}: {explain_unknown(f'--{key}', known)}")


def _texts(node: Any, location: str) -> Iterator[str]:
    """The scalars of a value as written: 1.10 stays 1.10."""
    for item in node.value if isinstance(node.value, list) else [node]:
        if not isinstance(getattr(item, "value", None), str):
            raise ConfigError(f"{location}: allowed: a value, or a list of values")
        yield item.value


def _value_of(parser: OptionParser, action: argparse.Action, texts: list[str], location: str) -> Any:
    """The value as the parser would read it from the command line."""
    name = action.option_strings[0]
    if action.nargs == 0:
        text = texts[0].lower() if len(texts) == 1 else ""
        if text not in _SWITCHES:
            raise ConfigError(f"{location}: {name.lstrip('-')} is {', '.join(texts)!r}; allowed: true or false")
        return _SWITCHES[text]
    if action.nargs != "+" and len(texts) != 1:
        raise ConfigError(f"{location}: {name.lstrip('-')} has {len(texts)} values; allowed: one")
    if not texts:
        raise ConfigError(f"{location}: {name.lstrip('-')} has no values; allowed: one or more")

    class _Alone(OptionParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{location}: {message.removeprefix('argument ')}")

    alone = _Alone(parents=[parser], add_help=False, conflict_handler="resolve", allow_abbrev=False)
    arguments = [name, *texts] if action.nargs == "+" else [f"{name}={texts[0]}"]
    value = getattr(alone.parse_args(arguments), action.dest)
    if action.dest in OPTIONS:
        try:
            OPTIONS[action.dest].parse(str(value))
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}") from None
    return value
