"""The version stands in one place, and the changelog keeps its form."""

from __future__ import annotations

import re

import minisgl_backend
from tests.packaging.installed import ROOT

CHANGELOG = (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_stands_in_one_place() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^dynamic = \[.*"version"', pyproject, re.MULTILINE)
    assert not re.search(r"^version = ", pyproject, re.MULTILINE)
    stated = re.compile(rf"\b{re.escape(minisgl_backend.__version__)}\b")
    files = [*ROOT.glob("minisgl_backend/**/*.py"), *ROOT.glob("client/*.py"), *ROOT.glob("scripts/*")]
    assert [path for path in files if path.suffix in (".py", ".sh") and stated.search(path.read_text())] == [
        ROOT / "minisgl_backend" / "__init__.py"
    ]


def test_the_changelog_keeps_its_form() -> None:
    versions = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:]), versions
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= KINDS
    assert all(line.startswith("- ") for line in CHANGELOG.splitlines() if re.match(r"\s*[-*] ", line))
