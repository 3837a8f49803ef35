"""docs/kernels.md shows what the command prints. `python -m tests.docs.test_kernels_page` writes it anew."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.model_shapes import SHAPES
from minisgl_backend.__main__ import app
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "kernels.md"
MODELS = ("qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b")


def block(model: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    result = CliRunner().invoke(app, ["kernels", "--model", str(folder), "--device-facts", "h100"])
    assert result.exit_code == 0, result.output
    return f"```text\n$ minisgl kernels {model} --device-facts h100\n{result.output}```"


@pytest.mark.parametrize("model", MODELS)
def test_the_page_shows_what_the_command_prints(model: str, tmp_path: Path) -> None:
    pattern = rf"<!-- kernels {re.escape(model)} -->\n(.*)\n<!-- /kernels {re.escape(model)} -->"
    shown = re.search(pattern, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == block(model, tmp_path), "python -m tests.docs.test_kernels_page writes it anew"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name in MODELS:
        before, rest = text.split(f"<!-- kernels {name} -->")
        after = rest.split(f"<!-- /kernels {name} -->")[1]
        with tempfile.TemporaryDirectory() as folder:
            text = f"{before}<!-- kernels {name} -->\n{block(name, Path(folder))}\n<!-- /kernels {name} -->{after}"
    PAGE.write_text(text, encoding="utf-8")
