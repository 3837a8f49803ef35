"""The soak of benchmarks/soak.py, for half a minute: no wrong text, no hang, nothing left behind.

Continuous integration runs two minutes of it beside the tests.
"""

from __future__ import annotations

import pytest

from benchmarks import soak
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_half_a_minute_of_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    arguments = ["--minutes", "0.5", "--kills", "2", "--clients", "16"]
    assert soak.main(arguments) == 0, capsys.readouterr()
