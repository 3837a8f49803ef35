"""The parser of the commands' options, and the file that may hold them. Standard library only, but for YAML."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from minisgl_backend.config import OPTIONS
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.foreign_options import explain_unknown

_MAPPINGS = frozenset({"speculative_config"})  # JSON objects, which may be written as YAML's
_COMMAND_LINE_ONLY = ("--help", "--version", "--config")
_SWITCHES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


class YamlMissing(ConfigError):
    """The file cannot be read before PyYAML is installed."""


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that says what an unknown option is called here, or which one was meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else list(args)
        # Before what is missing: whoever mistypes --out is not told that it is required.
        self._refuse(
            [one for one in given if one.startswith("--") and one.partition("=")[0] not in self._option_string_actions]
        )
        values, unknown = self.parse_known_args(given, namespace)
        self._refuse([one for one in unknown if one.startswith("-")])
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return values

    def _refuse(self, options: Sequence[str]) -> None:
        if options:
            self.error(explain_unknown(options[0], self.option_names()))

    def option_names(self) -> list[str]:
        """All that --help shows."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [name for action in shown for name in action.option_strings]


def set_defaults_from_file(parser: OptionParser, path: Path) -> frozenset[str]:
    """What the YAML file says becomes the parser's defaults: options by their names, without the dashes before them.

    Returns the names of the values that it sets. Raises ConfigError naming the file, the line, and what is allowed;
    YamlMissing where PyYAML is.
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
        place = f"{path}:{key.start_mark.line + 1}"
        action = _action_of(parser, str(key.value), place)
        if action.dest in found:
            raise ConfigError(f"{place}: {key.value} is there twice")
        if action.dest in _MAPPINGS and isinstance(value, yaml.MappingNode):
            texts = [json.dumps(yaml.safe_load(yaml.serialize(value)))]
        else:
            texts = list(_texts(value, place))
        found[action.dest] = _value_of(parser, action, texts, place)
    parser.set_defaults(**found)
    return frozenset(found)


def _action_of(parser: OptionParser, key: str, place: str) -> argparse.Action:
    name = "--" + key.removeprefix("--").replace("_", "-")
    if name in _COMMAND_LINE_ONLY:
        raise ConfigError(f"{place}: {key} is for the command line")
    for action in parser._actions:
        if name in action.option_strings:
            return action
    known = [option for option in parser.option_names() if option not in _COMMAND_LINE_ONLY]
    raise ConfigError(f"{place}: {explain_unknown(f'--{key}', known)}")


def _texts(node: Any, place: str) -> Iterator[str]:
    """The scalars of a value, as they are written: 1.10 stays 1.10."""
    for item in node.value if isinstance(node.value, list) else [node]:
        if not isinstance(getattr(item, "value", None), str):
            raise ConfigError(f"{place}: allowed: a value, or a list of values")
        yield item.value


def _value_of(parser: OptionParser, action: argparse.Action, texts: list[str], place: str) -> Any:
    """As the parser would read it from the command line."""
    name = action.option_strings[0]
    if action.nargs == 0:
        text = texts[0].lower() if len(texts) == 1 else ""
        if text not in _SWITCHES:
            raise ConfigError(f"{place}: {name.lstrip('-')} is {', '.join(texts)!r}; allowed: true or false")
        return _SWITCHES[text]
    if action.nargs != "+" and len(texts) != 1:
        raise ConfigError(f"{place}: {name.lstrip('-')} has {len(texts)} values; allowed: one")
    if not texts:
        raise ConfigError(f"{place}: {name.lstrip('-')} has no values; allowed: one or more")

    class _Alone(OptionParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{place}: {message.removeprefix('argument ')}")

    alone = _Alone(parents=[parser], add_help=False, conflict_handler="resolve", allow_abbrev=False)
    arguments = [name, *texts] if action.nargs == "+" else [f"{name}={texts[0]}"]
    value = getattr(alone.parse_args(arguments), action.dest)
    if action.dest in OPTIONS:
        try:
            OPTIONS[action.dest].parse(str(value))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    return value
