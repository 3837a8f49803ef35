"""`minisgl init`: what it writes, and what it refuses before it writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.host.new_repository import main
from minisgl_backend.host.options.engine import read_engine_config
from minisgl_backend.installation import model_repository


def test_the_options_are_in_the_new_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = model_repository() / "engine" / "demo_model", tmp_path / "not" / "yet"
    assert main(["--model", str(model), "--tp", "2", "--attn", "torch", "--out", str(target)]) == 0
    config = read_engine_config(target)
    assert (config.model, config.tp, config.attention_backend) == (str(model.resolve()), 2, "torch")
    assert f"tritonserver --model-repository {target}" in capsys.readouterr().out
    names = sorted(path.name for path in target.iterdir())
    assert names == sorted(path.name for path in model_repository().iterdir())
    assert all((target / name / "1").is_dir() and (target / name / "config.pbtxt").is_file() for name in names)
    assert not any(path.is_symlink() for path in target.rglob("*")), "it can be carried to another machine"
    assert (target / "engine" / "config.pbtxt").read_text().count('key: "model"') == 1


def test_without_options_it_serves_the_demo_model(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0  # a folder that exists and is empty
    assert read_engine_config(tmp_path) == read_engine_config(model_repository())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "3"], "page_size is 3; allowed: a power of two"),
        (["--tp", "3"], "tp is 3; allowed: a divisor of the model's num_attention_heads, which is 8"),
        (["--model", "/no/such/model"], "model is '/no/such/model', which is no folder"),
        (["--model", "."], "no config.json"),
    ],
)
def test_wrong_options_write_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--out", "new"]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "which is not empty; allowed: a new folder, or an empty one"),
        ("full/file", "which is no folder; allowed: a new folder, or an empty one"),
        ("with space", "without spaces or signs of the shell"),
        ("mödels", "beyond ASCII"),
        ("full/file/below", "which cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_used_is_left_alone(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(["--out", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_folder_to_write_to_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--out" in capsys.readouterr().err
