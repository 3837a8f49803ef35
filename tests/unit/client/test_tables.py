"""Tables of figures: every figure is printed whole, whatever the width."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import pytest
from rich.cells import cell_len

from client.bench.compare import compare_reports
from client.bench.figures import Figures, figures_of
from client.bench.generator import Record, Run
from client.bench.report import Report, figures_table
from client.bench.workload import Load
from client.console import print_figures

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TITLE = "[bold]model at http://[fd00::5]:9000/v1"
PERCENTILES = "1,234 / 1,234 / 1,234"


def figures(level: int) -> Figures:
    done = Record(0.0, 0.0, 9.0, array("d", [1.2341, 5.0]), 9, 5, finished=True)
    return figures_of(Run(Load({"concurrency": level}, [], level), [done], False))


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_figures(figures_table([figures(level) for level in LEVELS], TITLE))
    return capsys.readouterr().out.splitlines()


def be_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns without colors. (In a fixture stdout would be another one.)"""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_a_terminal_gets_columns_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    be_narrow(monkeypatch)
    lines = printed(capsys)
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert all(text.count(f" {level} at once") == 1 for level in LEVELS)
    assert text.count(PERCENTILES) == len(LEVELS)
    rows = [line for line in lines if "first token" in line]
    assert len(rows) == len(LEVELS) / 2
    assert text.count("Times: p50") == 1


def test_a_pipe_gets_one_table_of_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys)
    (row,) = (line for line in lines if "first token" in line)
    assert row.count(PERCENTILES) == len(LEVELS)
    assert [line.strip() for line in lines if "fd00" in line] == [TITLE]


def test_a_column_wider_than_the_terminal_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be_narrow(monkeypatch)
    names, files = [f"[bold]{letter * 90}" for letter in "ab"], [tmp_path / letter for letter in "ab"]
    for name, file in zip(names, files, strict=True):
        Report(name, {}, [figures(1).as_json()]).write(file)
    for table in compare_reports([Report.read(file) for file in files]):
        print_figures(table)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(name in line for line in lines) for name in names)
    assert not any("…" in line for line in lines)
