"""How far a reader of one request has to walk: the files that each process enters for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import RunningServer
from tests.e2e.wire import Server

WALK = Path(__file__).parent / "walk"
# By the file that only this process enters.
MOST_FILES = {
    "serving/tokenizer_model.py": 12,
    "serving/engine_model.py": 19,
    "engine/core_server.py": 58,
    "serving/detokenizer_model.py": 11,
}


def ask(server: Server) -> int:
    """The number of pieces."""
    return len(server.events(text_input="What is 17 + 25?", max_tokens=16))


def record_models(repository: Path) -> None:
    for model in repository.glob("*/1/model.py"):
        lines = f"import sys\n\nsys.path.insert(0, {str(WALK)!r})\nimport walk_recorder\n\n"
        model.write_text(lines + model.read_text(encoding="utf-8"), encoding="utf-8")


def test_a_request_enters_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(WALK))
    monkeypatch.setenv("WALK", str(tmp_path))
    with RunningServer(tmp_path, {}, prepare=record_models) as server:
        ask(server)  # what is made at the first one is not counted
        (tmp_path / "record").touch()
        time.sleep(0.2)
        assert ask(server) > 1
        (tmp_path / "record").unlink()
        time.sleep(0.5)
    found = [path.read_text(encoding="utf-8").split() for path in tmp_path.glob("*.files")]
    for own, most in MOST_FILES.items():
        files = next(files for files in found if own in files)
        print(f"{own}: {len(files)} files: {', '.join(files)}")
        assert len(files) <= most, files
