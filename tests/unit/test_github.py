"""The files that GitHub and pre-commit read are what their schemas allow, and name what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"

SCHEMAS = {
    "workflows/*.yml": "vendor.github-workflows",
    "ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_files_fit_their_schema(pattern: str) -> None:
    files = [str(path) for path in GITHUB.glob(pattern)]
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[pattern], *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_of_contributing_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)", (GITHUB / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        assert (GITHUB / link).exists(), link


def test_the_workflow_runs_what_is_there() -> None:
    workflow = (GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8")
    for script in re.findall(r"bash (\S+)", workflow):
        assert (ROOT / script).is_file(), script


def test_hooks_run_what_is_there() -> None:
    hooks = yaml.safe_load((GITHUB / "pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    for path in re.findall(r"tests/\S+", " ".join(hook["entry"] for hook in hooks)):
        assert (ROOT / path).exists(), path
