"""benchmarks.cpu without any model: what is asked for, what is compared, what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu, cpu_rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "vllm"], "--only is 'vllm'"),
        (["--streams", "0"], "allowed: 1 to 8"),
        (["--streams", "one"], "allowed: numbers"),
        (["--prompt", "1000", "--answer", "64"], "allowed: 1024 together"),
        (["--prompt", "129"], "up to 128"),
        (["--rounds", "0"], "at least 1"),
        (["--gguf", "no.gguf"], "allowed: a file"),
        (["--gguf", "pyproject.toml", "--only", "llama.cpp-bf16"], "allowed: own, llama.cpp-gguf"),
        (["--only", "llama.cpp-gguf"], "allowed: own, own-float32"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.parse_arguments(arguments)
    assert words in capsys.readouterr().err


def test_the_fastest_peer_counts() -> None:
    def figures(one: float, eight: float) -> dict[str, Any]:
        return {"is": "x", **{n: {"decode_tok_s": v, "tok_processor_s": v} for n, v in (("1", one), ("8", eight))}}

    found = {"own": figures(10, 80), "llama.cpp-bf16": figures(8, 20), "llama.cpp-f16": figures(5, 40)}
    assert cpu.ratios(found, [1, 8]) == {
        "1_decode_tok_s": 1.25,
        "1_tok_processor_s": 1.25,
        "8_decode_tok_s": 2.0,
        "8_tok_processor_s": 2.0,
    }
    assert cpu.ratios({"own": figures(1, 1), "llama.cpp-bf16": {"missing": "why"}}, [1]) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "q3_k"], "--only is 'q3_k'"),
        (["--measures", "two"], "allowed: one"),
        (["--rounds", "0"], "at least 1"),
        (["--answer", "1"], "at least 2"),
    ],
)
def test_wrong_arguments_of_rows_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cpu_rows.parse_arguments(arguments)
    assert words in capsys.readouterr().err


def test_a_row_is_one_shape_in_files_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are measured in turn, with the file that a run before has left."""
    asked: list[tuple[str, str]] = []

    class Told:
        missing = None

        def __init__(self, python: str, system: str, folder: Path, options: dict[str, Any]) -> None:
            self._system = system
            asked.append((system, Path(options.get("file", options.get("shape", ""))).name))

        def measure(self, streams: int, prompt: int, answer: int) -> cpu.Rate:
            rate = 30.0 if self._system == "own" else 20.0
            return cpu.Rate(rate, rate, rate, rate)

        def close(self) -> None:
            pass

    monkeypatch.setattr(cpu_rows, "Candidate", Told)
    (tmp_path / "qwen3-0.6b-q4_0.gguf").touch()
    args = cpu_rows.parse_arguments(["--folder", str(tmp_path)])
    found = cpu_rows.run_row(cpu_rows.ROWS["q4_0"], args)
    assert {name: one["ratio"] for name, one in found.items()} == {"one": 1.5, "eight": 1.5, "prompt": 1.5}
    (tmp_path / "qwen3-0.6b-q4_0-wide.gguf").touch()
    cpu_rows.run_row(cpu_rows.ROWS["awq"], args)
    file, wide = "qwen3-0.6b-q4_0.gguf", "qwen3-0.6b-q4_0-wide.gguf"
    assert asked == [("own", file), ("llama.cpp", file), ("own", "qwen3-0.6b-awq"), ("own", wide)]


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    """A Python without any packages: the worker needs its own system's alone, and says what that lacks."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    candidate = cpu.Candidate(
        str(bare), "llama.cpp", tmp_path, {"format": "bf16", "threads": 1, "flash_attention": False}
    )
    assert candidate.missing is not None
    assert "pip install llama-cpp-python" in candidate.missing
    candidate.close()
    assert json.dumps(candidate.description) == '""'
