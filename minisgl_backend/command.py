"""The command `minisgl`. Its code is the client's, whose package has two names.

A wheel calls it `minisgl_client`: `client` would be in the way of other programs. In a checkout it is the folder
`client`.
"""

from __future__ import annotations

import importlib
import importlib.util


def main() -> None:
    """The entry point of the installed command."""
    package = "minisgl_client" if importlib.util.find_spec("minisgl_client") is not None else "client"
    importlib.import_module(f"{package}.cli").main()
