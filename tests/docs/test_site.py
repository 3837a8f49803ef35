"""The site builds without a warning, from pages that are all in its menu, and asks nothing of other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
REPOSITORY = "https://example.invalid/project"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly: a broken link, a missing anchor or a page outside the menu is an error."""
    pytest.importorskip("material", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(folder)]
    environment = {**os.environ, "MINISGL_REPOSITORY_URL": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\"> ]+)", page.read_text())
        assert [url for url in loaded if not url.startswith(REPOSITORY)] == [], page


def test_links_to_the_source_lead_to_the_repository(site: Path) -> None:
    page = (site / "performance" / "index.html").read_text()
    assert f"{REPOSITORY}/blob/main/benchmarks/results/peers.json" in page


def test_marks_of_blocks_are_not_shown(site: Path) -> None:
    page = (site / "quickstart" / "index.html").read_text()
    assert "<table>" in page
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", page, flags=re.DOTALL)
    assert "norun" not in text


@pytest.mark.parametrize("name", ["options", "operations", "moving"])
def test_tables_are_tables(site: Path, name: str) -> None:
    text = (site / name / "index.html").read_text()
    assert "<table>" in text
    assert not re.search(r"^\| ", text, re.MULTILINE)
