"""Commands of whoever has the admin key: refused without it, carried out by all engine cores or by none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.admin_commands import MOST_COMMANDS, AdminCommands, CommandResult, encode
from minisgl_backend.delivery.core_commands import CoreCommands
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.ipc import adapter_table
from minisgl_backend.ipc.adapter_table import AdapterTable, ServedAdapters
from minisgl_backend.ipc.messages import Done, DropAdapter, Failed, ReadAdapter, ServeAdapter, UnloadAdapter

KEY = "a key"


class Core:
    """Answers at once, by `answer`."""

    def __init__(self, number: int, note: Callable[[int, Any], None]) -> None:
        self.core, self._note = number, note
        self.heard: list[Any] = []
        self.answer: Callable[[Any], Any] = lambda command: Done(id=command.id, result="00ff")

    def send(self, command: Any) -> None:
        self.heard.append(command)
        answer = self.answer(command)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            self._note(self.core, answer)


class Door:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.root, self.sockets = folder / "root", folder / "sockets"
        self.sockets.mkdir()
        for name in ("one", "two"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "adapter_config.json").write_text("{}")
        self.cores: list[Core] = []
        self.commands = CoreCommands(self.cores, 3, threading.Condition())  # type: ignore[arg-type]
        self.cores += [Core(number, self.commands.note) for number in range(2)]
        client: Any = SimpleNamespace(commands=self.commands)
        self.config = EngineConfig(adapters="old=/a/old", adapter_dir=str(self.root), **options)
        self.admin = AdminCommands(self.config, client, self.sockets, key=KEY, reserved=("base",))

    def ask(self, key: str = KEY, **command: Any) -> CommandResult:
        told: list[CommandResult] = []
        done = threading.Event()
        self.admin.submit(json.dumps(command), key, lambda result: (told.append(result), done.set()))
        assert done.wait(10)
        return told[0]

    def load(self, name: str = "x", path: str = "one", **more: Any) -> CommandResult:
        return self.ask(command="load_adapter", name=name, path=path, **more)

    def kinds(self, core: int = 0) -> list[type]:
        return [type(command) for command in self.cores[core].heard]

    def served(self) -> set[str]:
        return set(ServedAdapters(self.config, self.sockets).folders()) - {"one", "two"}


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


@pytest.mark.parametrize("key", ["", "a key ", " a key", "A key", "a ke", "a key\0", "é", "\ud800"])
def test_a_wrong_key_does_nothing(door: Door, key: str) -> None:
    for command in ("list_adapters", "load_adapter", "none"):
        assert door.ask(key, command=command, name="x").status == 401
    assert door.admin.num_refused == 3
    assert door.kinds() == []


def test_without_a_key_none_is_right(door: Door, tmp_path: Path) -> None:
    client: Any = SimpleNamespace(commands=door.commands)
    admin = AdminCommands(door.config, client, tmp_path, key="", reserved=())
    told: list[CommandResult] = []
    for key in ("", KEY):
        admin.submit('{"command": "list_adapters"}', key, told.append)
    assert [one.status for one in told] == [401, 401]


def test_what_is_loaded_and_unloaded(door: Door) -> None:
    found = door.load()
    assert (found.status, set(found.adapters)) == (200, {"old", "x"})
    assert json.loads(encode(found))["success"] is True
    for core in (0, 1):
        assert door.kinds(core) == [ReadAdapter, ServeAdapter]
    assert door.served() == {"old", "x"}
    assert door.load().code == "already_loaded"
    assert door.load(path=str(door.root / "two"), replace=True).adapters["x"] == str(door.root / "two")
    for name in ("x", "old"):
        assert door.ask(command="unload_adapter", name=name).status == 200
    assert door.served() == set()
    door.cores[0].answer = door.cores[1].answer = lambda command: Failed(
        command.id, "InvalidRequestError", "is not loaded"
    )
    found = door.ask(command="unload_adapter", name="old")
    assert (found.status, found.code) == (404, "not_found")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ({"command": "burn"}, 400), ({}, 400), ({"command": "load_adapter"}, 400),
        ({"command": "load_adapter", "name": "x", "pth": "one"}, 400),
        ({"command": "load_adapter", "name": "base", "path": "one"}, 400),
        ({"command": "load_adapter", "name": "", "path": "one"}, 400),
        ({"command": "load_adapter", "name": "a\nb", "path": "one"}, 400),
        ({"command": "load_adapter", "name": "a" * 129, "path": "one"}, 400),
        ({"command": "load_adapter", "name": "x", "path": "/etc"}, 403),
        ({"command": "load_adapter", "name": "../x"}, 403),
        ({"command": "load_adapter", "name": "none"}, 404),
    ],
)  # fmt: skip
def test_what_is_refused_reaches_no_core(door: Door, command: dict[str, Any], status: int) -> None:
    assert door.ask(**command).status == status
    assert door.kinds() == []
    assert door.served() == {"old"}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda command: Failed(command.id, "ConfigError", "is wrong"), 400),
        (lambda command: Failed(command.id, "CapacityError", "no room"), 503),
        (lambda command: EngineDeadError("down"), 503),
        (lambda command: Done(id=command.id, result="ff00"), 409),
    ],
)
def test_a_load_that_one_core_fails_changes_nothing(door: Door, answer: Any, status: int) -> None:
    door.cores[1].answer = answer
    assert door.load().status == status
    for core in (0, 1):
        assert door.kinds(core) == [ReadAdapter, DropAdapter]
    assert door.cores[0].heard[1].read == door.cores[0].heard[0].id
    assert door.served() == {"old"}


def test_a_load_that_cannot_be_noted_leaves_nothing_in_the_cores(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: AdapterTable, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AdapterTable, "write", full)
    assert door.load().status == 500
    for core in (0, 1):
        assert door.kinds(core) == [ReadAdapter, DropAdapter]
    assert door.served() == {"old"}


def test_a_core_that_starts_meanwhile_finds_it(door: Door) -> None:
    """It is told before any core serves it."""

    def answer(command: Any) -> Any:
        if isinstance(command, ServeAdapter):
            table = AdapterTable(door.sockets).read()
            assert table is not None
            assert table["x"].folder == str(door.root / "one")
            return EngineDeadError("down")
        return Done(id=command.id, result="00ff")

    door.cores[1].answer = answer
    assert door.load().status == 200


def test_a_core_that_ends_is_not_waited_for(door: Door) -> None:
    door.cores[1].answer = lambda command: None if isinstance(command, ReadAdapter) else EngineDeadError("down")
    ended = threading.Timer(0.2, lambda: door.commands.note_down(1))
    ended.start()
    found = door.load()
    ended.join()
    assert (found.status, door.served()) == (503, {"old"})
    assert UnloadAdapter not in door.kinds()


def test_a_folder_of_many_adapters_is_not_listed_for_each_request(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    served, listed = ServedAdapters(door.config, door.sockets), []
    monkeypatch.setattr(adapter_table, "names_below", lambda root: listed.append(root) or ["one"])
    for _ in range(3):
        assert set(served.folders()) == {"old", "one"}
    assert len(listed) == 1
    (door.root / "three").mkdir()
    served.folders()
    assert len(listed) == 2


def test_commands_that_wait_are_bounded(door: Door) -> None:
    go = threading.Event()
    door.cores[0].answer = lambda command: go.wait(10) and Done(id=command.id, result="00ff")
    told: list[CommandResult] = []
    for _ in range(MOST_COMMANDS + 3):
        door.admin.submit('{"command": "load_adapter", "name": "x", "path": "one", "replace": true}', KEY, told.append)
    assert [one.status for one in told] == [503] * 3
    go.set()
    assert door.ask(command="list_adapters").status in (200, 503)
    door.admin.close()


def test_one_change_at_a_time(door: Door) -> None:
    table, other = AdapterTable(door.sockets), AdapterTable(door.sockets)
    with table.changing(), pytest.raises(Exception, match="another adapter is being loaded"), other.changing(0.1):
        pass
    with other.changing(0.1):
        pass
