"""Responses that are kept: found by all workers, bounded, and failed where the process that computed them died."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.response_store import ResponseStore
from minisgl_backend.openai.routes.responses import Kept

ITEMS: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "hello"}]


def response(name: str, *, length: int = 10) -> dict[str, Any]:
    return {"id": name, "status": "completed", "output": [{"type": "message", "content": "x" * length}]}


def test_another_worker_finds_what_one_kept(tmp_path: Path) -> None:
    async def use() -> None:
        one, two = (ResponseStore(tmp_path / "store", 10_000) for _ in range(2))
        assert await one.keep(response("a"), ITEMS)
        found = await two.find("a")
        assert found is not None
        assert found.response == response("a")
        assert found.conversation == [*ITEMS, *response("a")["output"]]
        assert await two.delete("a")
        assert not await one.delete("a")
        assert await one.find("a") is None
        one.close()
        two.close()

    asyncio.run(use())


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 3_000)
        for name in "abc":
            assert await store.keep(response(name, length=700), ITEMS)
        assert await store.find("a") is not None
        await store.keep(response("d", length=700), ITEMS)
        assert [name for name in "abcd" if await store.find(name) is not None] == ["a", "c", "d"]
        assert not await store.keep(response("e", length=5_000), ITEMS)
        store.close()

    asyncio.run(use())


def test_one_in_the_background_is_cancelled_by_any_worker_or_fails_with_its_own(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 10_000)
        await store.keep({**response("a"), "status": "in_progress"}, ITEMS, running=True)
        assert not await store.is_cancelled("a")
        await ResponseStore(tmp_path / "store", 10_000).cancel("a")
        assert await store.is_cancelled("a")
        with subprocess.Popen(["true"]) as dead:
            dead.wait()
        await store._do(lambda database: database.execute("UPDATE responses SET owner = ?", (dead.pid,)))
        found = await store.find("a")
        assert found is not None
        assert found.response["status"] == "failed"
        store.close()

    asyncio.run(use())


def test_the_sum_of_sizes_is_kept_as_responses_come_change_and_go(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 5_000)
        for number in range(20):
            await store.keep(response(str(number % 7), length=100 * number), ITEMS)
        await store.delete("5")
        sums = (
            "SELECT bytes, (SELECT SUM(size) FROM responses), (SELECT SUM(LENGTH(response) + LENGTH(items)) FROM texts)"
        )
        kept, sizes, texts = await store._do(lambda database: database.execute(f"{sums} FROM total").fetchone())
        assert 0 < kept == sizes == texts <= 5_000
        store.close()

    asyncio.run(use())


def test_one_in_the_background_that_was_deleted_stays_so(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 10_000)
        kept = Kept(store, ITEMS)
        await kept.begin(response("a"))
        await store.delete("a")
        assert await kept.end(response("a"))
        assert await store.find("a") is None
        store.close()

    asyncio.run(use())


def test_what_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 3_000)
        kept, large = Kept(store, ITEMS), response("a", length=5_000)
        assert not await kept.keep(large)
        with pytest.raises(ApiError) as refused:
            await kept.begin(large)
        assert refused.value.status == 413
        await kept.begin(response("a"))
        assert not await kept.end(large)
        found = await store.find("a")
        assert found is not None
        assert (found.response["status"], found.response["output"]) == ("failed", [])

        def full(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(store, "_locked", full)
        assert not await kept.keep(response("b"))
        with pytest.raises(ApiError) as refused:
            await kept.begin(response("b"))
        assert refused.value.status == 507

    asyncio.run(use())


def test_one_whose_end_could_not_be_kept_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes no row, but lets go of a file; any worker tells of it, and reading needs no room."""

    async def use() -> None:
        store, other = (ResponseStore(tmp_path / "store", 10_000) for _ in range(2))
        kept, begun = Kept(store, ITEMS), {**response("a"), "status": "in_progress"}
        await kept.begin(begun)
        found = await other.find("a")
        assert found is not None
        assert found.response["status"] == "in_progress"

        async def full(*arguments: Any, **options: Any) -> bool:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(store, "keep", full)
            assert not await kept.end(response("a"))
            await store.note_ended("a")
        for worker in (store, other):
            found = await worker.find("a")
            assert found is not None
            assert found.response["status"] == "failed"
            assert "could not be kept" in found.response["error"]["message"]
        await kept.begin({**begun, "id": "b"})
        assert await kept.end(response("b"))
        await store.note_ended("b")
        found = await other.find("b")
        assert found is not None
        assert found.response["status"] == "completed"
        assert not list(tmp_path.glob("*.running"))
        store.close()
        other.close()

    asyncio.run(use())


def test_items_of_any_stored_response_are_found_by_their_ids(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 10_000)
        said = [{"type": "reasoning", "id": "rs_1"}, {"type": "function_call", "id": "fc_1"}]
        await store.keep({"id": "a", "status": "completed", "output": said}, [{**ITEMS[0], "id": "msg_0"}])
        second = {"id": "b", "status": "completed", "output": [{"type": "message", "id": "msg_1"}]}
        await store.keep(second, [*ITEMS, said[1]])
        found = await store.find_items(["rs_1", "fc_1", "msg_1", "msg_0", "msg_2"])
        assert list(found) == ["rs_1", "fc_1", "msg_1", "msg_0"]
        assert found["fc_1"] == said[1]
        await store.delete("b")
        assert list(await store.find_items(["msg_1", "fc_1"])) == ["fc_1"]  # the other one's conversation has it, too
        await store.delete("a")
        assert await store.find_items(["fc_1", "rs_1"]) == {}
        store.close()

    asyncio.run(use())


def test_one_that_was_cancelled_says_so_at_once_and_ever_after(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "store", 10_000)
        await store.keep({**response("a"), "status": "in_progress"}, ITEMS, running=True)
        await ResponseStore(tmp_path / "store", 10_000).cancel("a")
        statuses = []
        for ended in ({}, {"status": "failed", "error": {"code": "server_error"}}, {"status": "completed"}):
            if ended:
                await store.keep({**response("a"), **ended}, ITEMS, again=True)
            found = await store.find("a")
            assert found is not None
            statuses.append((found.response["status"], found.response.get("error")))
        assert statuses == [("cancelled", None)] * 3
        store.close()

    asyncio.run(use())
