"""Adapters that are read while the engine serves: requests wait for them and can leave, within the host's room."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.engine import adapters as adapters_module
from minisgl_backend.engine.adapters import AdapterLoader, Source
from minisgl_backend.errors import CapacityError, ConfigError, EngineDeadError, InvalidRequestError
from minisgl_backend.ipc.messages import Done, DropAdapter, Failed, ReadAdapter, ServeAdapter, UnloadAdapter
from minisgl_backend.scheduler.adapters import AdapterBook
from minisgl_backend.scheduler.limits import SchedulerLimits
from tests.fakes import make_request


class Host:
    """Reads when told to; several ranks may need several tries."""

    def __init__(self) -> None:
        self.reading: dict[int, str] = {}
        self.begun: list[str] = []
        self.kept: dict[int, str] = {}
        self.ready = True
        self.tries = 1
        self.dead = False

    def begin(self, number: int, folder: str) -> None:
        if self.dead:
            raise EngineDeadError("a rank ended")
        assert number not in self.reading
        self.reading[number] = folder
        self.begun.append(folder)

    def is_read(self, number: int) -> bool:
        return self.ready

    def keep(self, number: int) -> bytes | None:
        if self.tries > 1:
            self.tries -= 1
            return None
        folder = self.reading.pop(number)
        if folder.endswith("wrong"):
            raise ConfigError(f"{folder} is wrong")
        self.kept[number] = folder
        return Path(folder).name.encode()

    def drop(self, number: int) -> None:
        self.reading.pop(number, None)
        self.kept.pop(number, None)


class Finder(Executor):
    """Looks for folders when told to."""

    def __init__(self) -> None:
        self.ready = True
        self.tasks: list[Callable[[], None]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self.tasks.append(work)
        if self.ready:
            self.go()
        return future

    def go(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdapterLoader:
    monkeypatch.setattr(adapters_module, "ASK_AGAIN_S", 0.0)
    for name in ("one", "two", "three", "wrong"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    limits = SchedulerLimits(
        page_size=4, num_pages=10, max_seq_len=40, max_running_requests=2, max_waiting_requests=9,
        max_prefill_length=40, mixed_prefill_length=40, num_adapter_slots=2, adapters_change=True,
    )  # fmt: skip
    return AdapterLoader(Host(), AdapterBook(limits), most=2, root=tmp_path, finder=Finder())


def ask(uid: int, name: str | None, **more: Any) -> Any:
    return make_request(uid, [1, 2], lora_name=name, **more)


def answers(loader: AdapterLoader) -> list[Any]:
    return [answer for _, answer in loader.take_answers()]


def load(loader: AdapterLoader, name: str, folder: str, number: int = 1) -> None:
    loader.obey(ReadAdapter(front=0, id=number, folder=folder))
    loader.poll()
    (done,) = answers(loader)
    assert isinstance(done, Done), done
    loader.obey(ServeAdapter(front=0, id=number + 1, read=number, name=name, folder=folder, digest=done.result))
    assert answers(loader) == [Done(id=number + 1)]


def test_requests_wait_until_their_adapter_is_read(loader: AdapterLoader) -> None:
    host: Any = loader.host
    host.ready, host.tries = False, 2
    first, second = ask(1, "one"), ask(2, "one", n=3)
    assert loader.holds(first, 9)
    assert loader.holds(second, 9)
    assert not loader.holds(ask(3, None), 9)
    assert not loader.holds(ask(4, "../none"), 9), "the scheduler refuses it"
    with pytest.raises(CapacityError, match="2 requests wait for adapters"):
        loader.holds(ask(5, "one"), 2)
    assert (loader.num_waiting, loader.is_busy, loader.poll()) == (2, True, [])
    assert len(host.reading) == 1, "once for all"
    assert loader.cancel(2) == 3
    assert loader.cancel(2) == 0
    host.ready = True
    assert loader.poll() == [], "another rank still reads"
    assert [(one.request, one.error) for one in loader.poll()] == [(first, None)]
    assert not loader.holds(ask(6, "one"), 9)
    assert (loader.num_waiting, loader.is_busy) == (0, False)


def test_what_cannot_be_read_ends_its_requests_alone(loader: AdapterLoader) -> None:
    assert loader.holds(ask(1, "wrong"), 9)
    (ended,) = loader.poll()
    assert isinstance(ended.error, InvalidRequestError)
    assert str(ended.error) == "lora_name is 'wrong', which cannot be read: the server's log says why"
    assert loader.book.num_on_host == 0


def test_the_hosts_room_is_bounded_and_what_is_used_stays(loader: AdapterLoader) -> None:
    host: Any = loader.host
    for name in ("one", "two", "three"):
        assert loader.holds(ask(1, name), 9)
        loader.poll()
    assert loader.book.names == ["two", "three"]
    loader.book.note_begin(loader.book.find("two"), 1)
    loader.book.note_begin(loader.book.find("three"), 1)
    assert loader.holds(ask(2, "one"), 9)
    (ended,) = loader.poll()
    assert isinstance(ended.error, CapacityError)
    assert "2 adapters that requests use, all that max_loaded_adapters allows" in str(ended.error)
    assert host.reading == {}
    loader.obey(ReadAdapter(front=0, id=1, folder="/x"))
    assert [one.kind for one in answers(loader)] == ["CapacityError"]
    loader.book.note_end(loader.book.find("two"))
    assert loader.holds(ask(2, "one"), 9)
    loader.poll()
    loader.poll()
    assert sorted(map(Path, host.kept.values())) == sorted(loader.root / name for name in ("one", "three"))  # type: ignore[operator]


def test_a_folder_that_changed_is_not_taken_for_what_was_loaded(loader: AdapterLoader) -> None:
    load(loader, "x", "/a/one")
    loader.book.remove_idle()
    loader.sources["x"] = Source("/a/other", loader.sources["x"].digest)
    assert loader.holds(ask(1, "x"), 9)
    (ended,) = loader.poll()
    assert "whose folder has changed since it was loaded" in str(ended.error)
    loader.sources["x"] = Source("/a/other", b"")
    assert loader.holds(ask(1, "x"), 9)
    assert [one.error for one in loader.poll()] == [None]


def test_unloading_what_requests_wait_for(loader: AdapterLoader) -> None:
    host: Any = loader.host
    request = ask(1, "one")
    assert loader.holds(request, 9)
    loader.obey(UnloadAdapter(front=0, id=1, name="one"))
    assert answers(loader) == [Done(id=1)]
    assert [(one.request, str(one.error)) for one in loader.poll()] == [
        (request, "lora_name is 'one', which was unloaded meanwhile")
    ]
    assert (host.reading, host.kept, loader.poll()) == ({}, {}, [])
    loader.obey(UnloadAdapter(front=0, id=2, name="one"))
    assert [type(one) for one in answers(loader)] == [Failed]


def test_a_name_that_was_loaded_while_requests_waited_for_it(loader: AdapterLoader) -> None:
    host: Any = loader.host
    host.ready = False
    request = ask(1, "one")
    assert loader.holds(request, 9)
    loader.obey(ReadAdapter(front=0, id=1, folder="/a/new"))
    host.ready = True
    found = [one for _ in range(2) for one in loader.poll()]
    assert [(one.request, one.error) for one in found] == [(request, None)]
    loader.obey(ServeAdapter(front=0, id=2, read=1, name="one", folder="/a/new", digest=b"new".hex()))
    assert loader.book.find("one").digest == b"new"
    loader.poll()
    assert list(host.kept.values()) == ["/a/new"]


def test_what_a_command_has_read_and_not_served_is_forgotten(loader: AdapterLoader) -> None:
    host: Any = loader.host
    for number, end in ((1, DropAdapter(front=0, id=9, read=1)), (2, None)):
        loader.obey(ReadAdapter(front=0, id=number, folder="/a/x"))
        loader.poll()
        assert len(host.kept) == 1
        loader.forget_front(0) if end is None else loader.obey(end)
        assert host.kept == {}
    loader.obey(ReadAdapter(front=0, id=3, folder="/a/x"))
    loader.obey(DropAdapter(front=0, id=4, read=3))
    loader.forget_front(0)
    assert (host.reading, loader.poll()) == ({}, [])
    loader.obey(ReadAdapter(front=0, id=5, folder="/a/wrong"))
    loader.poll()
    assert answers(loader)[-1] == Failed(id=5, kind="ConfigError", message="/a/wrong is wrong")


def test_a_core_that_has_started_since_reads_it_later(loader: AdapterLoader) -> None:
    load(loader, "x", "/a/one")
    loader.obey(ServeAdapter(front=0, id=7, read=6, name="x", folder="/a/two", digest=b"two".hex()))
    assert answers(loader) == [Done(id=7)]
    assert loader.book.get("x") is None
    assert loader.holds(ask(1, "x"), 9)
    assert [one.error for one in loader.poll()] == [None]
    assert loader.book.find("x").digest == b"two"


def test_numbers_are_never_used_twice(loader: AdapterLoader) -> None:
    host: Any = loader.host
    seen: set[int] = set()
    for number in range(1, 40, 2):
        load(loader, "x", "/a/one", number)
        loader.poll()
        (kept,) = host.kept
        assert kept not in seen
        seen.add(kept)


def test_a_rank_that_ended_ends_the_engine(loader: AdapterLoader) -> None:
    host: Any = loader.host
    host.dead = True
    with pytest.raises(EngineDeadError):
        loader.obey(ReadAdapter(front=0, id=1, folder="/a/x"))


def test_a_wait_that_is_too_long(loader: AdapterLoader) -> None:
    assert loader.holds(ask(1, "one", deadline=5.0), 9)
    assert loader.overdue(4.0) == []
    assert loader.overdue(5.0) == [1]


def test_a_full_waiting_room_begins_no_reading(loader: AdapterLoader) -> None:
    host: Any = loader.host
    host.ready = False
    assert loader.holds(ask(1, "one"), 1)
    for name in ("one", "two", "two", "three"):
        with pytest.raises(CapacityError, match="1 requests wait for adapters"):
            loader.holds(ask(2, name), 1)
        loader.poll()
    assert [Path(one).name for one in host.reading.values()] == ["one"]
    host.ready = True
    assert [one.error for one in loader.poll()] == [None]
    assert (loader.book.names, loader.is_busy) == (["one"], False)


def test_what_cannot_be_read_costs_no_other_adapter(loader: AdapterLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it read again at once, unless its folder changes."""
    host: Any = loader.host
    begun = host.begun
    clock = [100.0]
    monkeypatch.setattr(adapters_module.time, "monotonic", lambda: clock[0])
    for name in ("one", "two", "wrong", "wrong", "wrong"):
        assert loader.holds(ask(1, name), 9)
        (ended,) = loader.poll()
        assert (ended.error is None) == (name != "wrong")
    loader.obey(ReadAdapter(front=0, id=1, folder="/a/wrong"))
    loader.poll()
    assert [one.kind for one in answers(loader)] == ["ConfigError"]
    assert loader.book.names == ["one", "two"]
    assert [Path(one).name for one in begun] == ["one", "two", "wrong", "wrong"]
    (loader.root / "wrong" / "adapter_model.safetensors").touch()  # type: ignore[operator]
    for wait_s, count in ((0.0, 5), (1.0, 5), (adapters_module.FAILED_S, 6)):
        clock[0] += wait_s
        assert loader.holds(ask(2, "wrong"), 9)
        assert "cannot be read" in str(loader.poll()[0].error)
        assert len(begun) == count


def test_what_has_failed_is_remembered_within_bounds(loader: AdapterLoader) -> None:
    assert loader.root is not None
    for number in range(adapters_module.MOST_FAILED + 3):
        loader.sources["x"] = Source(f"/a/{number}/wrong", b"")
        assert loader.holds(ask(1, "x"), 9)
        loader.poll()
    assert len(loader._failed) == adapters_module.MOST_FAILED


@pytest.mark.parametrize("folder", ["/a/one", "/a/wrong", "/a/changed"])
def test_a_name_loaded_again_while_it_is_read_again(loader: AdapterLoader, folder: str) -> None:
    """Who has asked before gets what the name stood for, or what it stands for now if that has gone."""
    host: Any = loader.host
    load(loader, "x", "/a/one")
    loader.obey(ReadAdapter(front=0, id=3, folder="/a/two"))
    loader.poll()
    loader.book.remove_idle()
    loader.sources["x"] = Source(folder, b"one")
    request = ask(1, "x")
    host.ready = False
    assert loader.holds(request, 9)
    loader.poll()
    loader.obey(ServeAdapter(front=0, id=4, read=3, name="x", folder="/a/two", digest=b"two".hex()))
    host.ready = True
    assert [(one.request, one.error) for one in loader.poll()] == [(request, None)]
    assert loader.book.find("x").digest == (b"one" if folder == "/a/one" else b"two")
    loader.poll()
    assert answers(loader)[-1] == Done(id=4)
    assert (loader.book.find("x").digest, loader.sources["x"]) == (b"two", Source("/a/two", b"two"))
    loader.poll()
    assert (list(host.kept.values()), loader.is_busy) == (["/a/two"], False)


def test_a_name_unloaded_while_it_is_to_stand_for_another(loader: AdapterLoader) -> None:
    host: Any = loader.host
    loader.obey(ReadAdapter(front=0, id=1, folder="/a/new"))
    loader.poll()
    host.ready = False
    assert loader.holds(ask(1, "one"), 9)
    loader.poll()
    loader.obey(ServeAdapter(front=0, id=2, read=1, name="one", folder="/a/new", digest=b"new".hex()))
    loader.obey(UnloadAdapter(front=0, id=3, name="one"))
    assert answers(loader)[1:] == [Done(id=2), Done(id=3)]
    assert "was unloaded meanwhile" in str(loader.poll()[0].error)
    assert (host.reading, host.kept, loader.sources, loader.is_busy) == ({}, {}, {}, False)


def test_folders_are_looked_for_apart_from_steps(loader: AdapterLoader) -> None:
    finder: Any = loader.finder
    finder.ready = False
    unknown, gone, known = ask(1, "none"), ask(2, "two"), ask(3, "one")
    for request in (unknown, gone, known):
        assert loader.holds(request, 9)
    assert loader.poll() == []
    assert loader.host.reading == {}  # type: ignore[attr-defined]
    assert loader.cancel(2) == 1
    shutil.rmtree(loader.root / "two")  # type: ignore[operator]
    finder.go()
    ended, found = loader.poll()
    assert (ended.request, found) == (unknown, (known, None))
    assert str(ended.error).startswith("lora_name is 'none', which is not served")
    assert (loader.num_waiting, loader.is_busy) == (0, False)


def test_an_adapter_that_nobody_waits_for_is_not_read(loader: AdapterLoader) -> None:
    host: Any = loader.host
    host.ready = False
    for uid, name in ((1, "one"), (2, "two")):
        assert loader.holds(ask(uid, name), 9)
    loader.poll()
    assert loader.cancel(2) == 1
    host.ready = True
    loader.poll()
    loader.poll()
    assert (loader.book.names, loader.is_busy) == (["one"], False)
