"""The compose file and the unit of systemd: true to the Dockerfiles, options and ports."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from minisgl_backend.host.options.server import parse_arguments, server_parser
from tests.packaging.installed import ROOT

FOLDER = ROOT / "docs" / "deploy"


def test_the_compose_file() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == {"cpu", "gpu"}
    ports = {str(port) for _, port in parse_arguments([]).ports}
    for name, service in compose["services"].items():
        build = service["build"]
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
        assert build["dockerfile"].endswith(name)
        assert {port.split(":")[-1] for port in service["ports"]} <= ports
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace >= parse_arguments([]).server.exit_timeout + 10


def test_the_unit(tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "minisgl.service")
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("minisgl", "serve")
    assert {argument for argument in arguments if argument.startswith("-")} <= {*server_parser("").option_names()}
    assert int(unit["Service"]["TimeoutStopSec"]) >= parse_arguments([]).server.exit_timeout + 10
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze to read the unit with")
    text = (FOLDER / "minisgl.service").read_text(encoding="utf-8").replace(program, "/bin/true")
    (tmp_path / "minisgl.service").write_text(text)
    done = subprocess.run(
        [analyze, "verify", str(tmp_path / "minisgl.service")], capture_output=True, text=True, check=False
    )
    assert "minisgl.service:" not in done.stderr, done.stderr
