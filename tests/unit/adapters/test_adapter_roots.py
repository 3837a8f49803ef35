"""Which folders a request or a command may name: those below the roots, whatever links are on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.adapters.roots import NoAdapter, OutsideRoots, below, check_sizes, is_folder_name, names_below
from minisgl_backend.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With `one`, `sub/two`, and what leads outside by a link: a folder, either file, the root's own name."""
    root = tmp_path / "root"
    for folder in (root / "one", root / "sub" / "two", tmp_path / "outside", tmp_path / "root-beside"):
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "inside").symlink_to(root / "sub" / "two")
    for name, kept in (("a", "adapter_config.json"), ("b", "adapter_model.safetensors")):
        (root / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if file == kept:
                (root / name / file).write_text("{}")
            else:
                (root / name / file).symlink_to(tmp_path / "outside" / file)
    (root / "empty").mkdir()
    (root / ".hidden").symlink_to(root / "one")
    return root


def test_what_is_below_a_root(root: Path) -> None:
    for given in ("one", "./one/", "sub/../one", str(root / "one"), "sub/two", "inside"):
        assert below((root.parent / "none", root), given).name in ("one", "two")
    assert list(names_below(root)) == ["inside", "one"]
    assert list(names_below(root / "none")) == []


@pytest.mark.parametrize(
    "given",
    ["", ".", "..", "/", "/etc", "../outside", "one/../../outside", "link", "a", "b", "../root-beside", "../root",
     "one\0", "one\n", "~", "a" * 5000, "\u202eone", "//etc", "/proc/self/cwd/outside"],
)  # fmt: skip
def test_what_is_not(root: Path, given: str) -> None:
    with pytest.raises(NoAdapter) as told:
        below((root,), given)
    assert isinstance(told.value, OutsideRoots) or given == "~"


def test_what_a_path_outside_has_is_not_told(root: Path) -> None:
    told = set()
    for given in ("../outside", "../none", "/etc/passwd", "/no/such/folder"):
        with pytest.raises(OutsideRoots) as error:
            below((root,), given)
        told.add(str(error.value).replace(repr(given), ""))
    assert len(told) == 1
    with pytest.raises(NoAdapter, match=r"'empty' has no adapter_config.json"):
        below((root,), "empty")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("one", True), ("été-2", True), ("a b", True), ("task-1", True), ("a/b", False), ("..", False), (".a", False),
     ("", False),     ("a\\b", False), ("a\0", False), ("a" * 129, False), ("a\u202eb", False)],
)  # fmt: skip
def test_names_that_a_request_may_look_for(name: str, is_one: bool) -> None:
    assert is_folder_name(name) is is_one


def test_files_that_are_too_large_are_not_read(root: Path) -> None:
    check_sizes(root / "one", 2)
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors has 2 bytes; allowed: up to 1"):
        check_sizes(root / "one", 1)
    with (root / "one" / "adapter_config.json").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(ConfigError, match=r"adapter_config.json has 2097152 bytes; allowed: up to 1048576"):
        check_sizes(root / "one", 2)
