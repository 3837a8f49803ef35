"""Responses that are kept: found by all workers, bounded, and failed where the process that computed them died."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from minisgl_backend.openai.response_store import ResponseStore

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
