"""Where `model` leads: a folder, the demo model, the hub, or a clear error."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models import folder as folder_module
from minisgl_backend.models.folder import find_model_dir, fingerprint, shown_name


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model_dir(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("name", "folder"), [("demo", "demo_model"), ("demo-vl", "demo_vl_model"), ("demo-eagle3", "demo_eagle3")]
)
def test_the_demo_model_and_its_head_are_found_beside_the_package(name: str, folder: str) -> None:
    assert find_model_dir(name).parts[-3:] == ("model_repository", "engine", folder)


@pytest.mark.parametrize("name", ["demo", "demo-eagle3", "Owner/Name", "/a/folder"])
def test_a_log_names_what_was_given(name: str) -> None:
    assert shown_name(name) == name
    if name.startswith("demo"):
        assert shown_name(str(find_model_dir(name))) == name


def test_a_missing_demo_model_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folder_module, "model_repository", lambda: tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"demo.*checkout"):
        find_model_dir("demo")


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "a/b/c", "~/no-such-folder-here"])
def test_what_looks_like_a_path_never_reaches_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_model_dir(name)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_model_dir(str(tmp_path))


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="a file"):
        find_model_dir(str(tmp_path / "model.safetensors"))


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"Owner/Name.*could not be fetched.*no route to host"):
        find_model_dir("Owner/Name")


def test_a_hub_id_with_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **options: str(tmp_path / model))
    assert find_model_dir("Owner/Name") == tmp_path / "Owner" / "Name"


@pytest.mark.parametrize("trusted", [False, True])
def test_the_tokenizers_code_comes_only_where_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    wanted: list[str] = []

    def download(model: str, *, allow_patterns: list[str], **options: object) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    find_model_dir("Owner/Name", trust_remote_code=trusted)
    assert ("*.py" in wanted) == trusted
    assert "*.json" in wanted


def test_a_fingerprint_is_that_of_a_model_wherever_it_is(tmp_path: Path) -> None:
    """Of large files, which are not read whole, the size and some bytes count."""
    weights = bytes(5 << 20)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "a.safetensors").write_bytes(weights)
    here, there = tmp_path / "here", tmp_path / "there"
    assert set(fingerprint(here)) == {"config.json", "a.safetensors"}
    assert fingerprint(here) == fingerprint(there)
    (there / "a.safetensors").write_bytes(weights + b"x")
    assert fingerprint(here)["a.safetensors"] != fingerprint(there)["a.safetensors"]
    (there / "a.safetensors").write_bytes(bytes(len(weights) - 1) + b"x")
    assert fingerprint(here)["a.safetensors"] != fingerprint(there)["a.safetensors"]
    (there / "config.json").write_text("{ }")
    assert fingerprint(here)["config.json"] != fingerprint(there)["config.json"]
    (there / "b.safetensors").symlink_to(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read: No such file"):
        fingerprint(there)
