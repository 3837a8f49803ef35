"""Prints pip's settings as uv's, which reads none of them: lines `export NAME=VALUE` for a shell.

pip's come from its files and from PIP_* variables (`pip config list`). Ends with status 1 and the setting's name where
one of them changes what is installed and has no counterpart: pip has to install then.

    python scripts/pip_settings.py .venv/bin/python
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

# pip's name -> uv's variable, and what separates its values; pip's own are separated by blanks
_LISTS = {
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
_VALUES = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
_SWITCHES = {"no-cache-dir": ("UV_NO_CACHE", "1"), "pre": ("UV_PRERELEASE", "allow"), "no-index": None}
# What changes nothing of what is installed
_IGNORED = frozenset(
    """
    disable-pip-version-check progress-bar compile no-compile no-input no-color quiet verbose retries resume-retries
    cache-dir log no-python-version-warning no-warn-script-location root-user-action break-system-packages
    require-virtualenv require-venv config-file prefer-binary exists-action keyring-provider format
    """.split()
)
# uv's default takes each package from the first index that has it; pip, from all, the best version
_ALWAYS = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}


class NoCounterpart(ValueError):
    """A setting of pip's that uv cannot be told."""


def read_settings(listed: str) -> dict[str, str]:
    """The settings of `pip install` from what `pip config list` prints: of the command before those for all, a variable
    before a file."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if rank is not None and rank >= found.get(key, (0, ""))[0]:
            found[key] = rank, str(ast.literal_eval(value))
    return {key.replace("_", "-"): value for key, (_, value) in found.items()}


def as_uv(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's variables. Raises NoCounterpart."""
    variables = dict(_ALWAYS)
    for key, value in settings.items():
        is_on = value.strip().lower() in ("1", "true", "yes", "on")
        if key in _LISTS:
            name, separator = _LISTS[key]
            variables[name] = separator.join(value.split())
        elif key in _VALUES:
            variables[_VALUES[key]] = value
        elif key in _SWITCHES and not is_on:
            continue
        elif switch := _SWITCHES.get(key):
            variables[switch[0]] = switch[1]
        elif key not in _IGNORED:
            raise NoCounterpart(key)
    return variables


def main(arguments: Sequence[str]) -> int:
    listed = subprocess.run(
        [arguments[0], "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    try:
        variables = as_uv(read_settings(listed))
    except NoCounterpart as error:
        print(f"uv has no {error}", file=sys.stderr)
        return 1
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
