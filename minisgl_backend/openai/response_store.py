"""Stored responses: for `previous_response_id`, for references to their items, and for retrieval by id.

A SQLite file that all workers of the endpoint share, in a folder that is removed with the server. Its size is limited:
the least recently used responses make room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_Result = TypeVar("_Result")
_WAIT_SECONDS = 10.0  # for another worker's write
_MAX_EVENTS = 1000  # read at a time
# Columns that are queried often are separate from the JSON, since SQLite reads and writes whole rows. Triggers sum the
# sizes.
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, size INTEGER, used REAL, owner INTEGER, cancelled INTEGER DEFAULT 0
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used, size);
CREATE TABLE IF NOT EXISTS texts (id TEXT PRIMARY KEY, response BLOB, items BLOB);
CREATE TABLE IF NOT EXISTS items (item TEXT, id TEXT, PRIMARY KEY (item, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_response ON items (id);
CREATE TABLE IF NOT EXISTS events (id TEXT, number INTEGER, data BLOB, PRIMARY KEY (id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (row INTEGER PRIMARY KEY CHECK (row = 1), bytes INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
CREATE TRIGGER IF NOT EXISTS response_added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size;
END;
CREATE TRIGGER IF NOT EXISTS response_changed AFTER UPDATE OF size ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size - old.size;
END;
CREATE TRIGGER IF NOT EXISTS response_removed AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - old.size;
    DELETE FROM texts WHERE id = old.id;
    DELETE FROM items WHERE id = old.id;
    DELETE FROM events WHERE id = old.id;
END;
"""


@dataclass(frozen=True)
class StoredResponse:
    """One response and the conversation up to it."""

    response: dict[str, Any]  # as returned to the client
    items: list[dict[str, Any]]  # the input, including earlier responses, without the output

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Up to `max_bytes` of JSON. Methods are for one event loop; files are accessed on other threads."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    async def keep(
        self, response: dict[str, Any], items: list[dict[str, Any]], *, running: bool = False, again: bool = False
    ) -> bool:
        """False if it is larger than the store's limit. `running`: this process will store it again. `again`: it was
        stored before, and stays deleted if it was deleted since."""
        encoded, conversation = msgspec.json.encode(response), msgspec.json.encode(items)
        size = len(encoded) + len(conversation)
        if size > self._max_bytes:
            return False
        owner = os.getpid() if running else 0
        named = [(item["id"], response["id"]) for item in (*items, *response["output"]) if _is_named(item)]
        if running:
            await asyncio.to_thread(self._mark(response["id"]).touch, 0o600)

        def write(database: sqlite3.Connection) -> bool:
            events = "(SELECT COALESCE(SUM(LENGTH(data)), 0) FROM events WHERE id = responses.id)"
            change = f"UPDATE responses SET size = ? + {events}, used = ?, owner = ? WHERE id = ?"
            values = (size, time.time(), owner, response["id"])
            changed = database.execute(change, values)
            if not changed.rowcount:
                if again:
                    return True
                database.execute("INSERT INTO responses (size, used, owner, id) VALUES (?, ?, ?, ?)", values)
            database.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", (response["id"], encoded, conversation))
            database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", named)
            self._make_room(database)
            return True

        return await self._do(write)

    async def find(self, response_id: str) -> StoredResponse | None:
        """None if it is not kept (any more). A running one whose process has died is reported as failed, and one that
        was cancelled as cancelled at once."""

        def read(database: sqlite3.Connection) -> tuple[bytes, bytes, int, int] | None:
            columns = "response, items, owner, cancelled"
            found: tuple[bytes, bytes, int, int] | None = database.execute(
                f"SELECT {columns} FROM responses JOIN texts USING (id) WHERE id = ?", (response_id,)
            ).fetchone()
            return found

        used = (time.time(), response_id)
        with contextlib.suppress(sqlite3.Error):  # reading also works with a full disk
            await self._do(lambda database: database.execute("UPDATE responses SET used = ? WHERE id = ?", used))
        row = await self._do(read)
        if row is None:
            return None
        response = msgspec.json.decode(row[0])
        if row[2] and not _is_alive(row[2]):
            response |= _failed("the process that computed this response died")
        elif row[2] and not self._mark(response_id).exists():
            row = await self._do(read)  # it may have ended in between
            if row is None:
                return None
            response = msgspec.json.decode(row[0])
            if row[2]:
                response |= _failed("the response was computed, and could not be kept")
        if row[3] and _is_alive(row[2]):  # the client that cancelled it was told so, whether or not it has ended since
            response |= {"status": "cancelled", "error": None, "incomplete_details": None}
        return StoredResponse(response, msgspec.json.decode(row[1]))

    async def find_items(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The items with these ids in any stored response, input or output; those that are not kept are left out."""
        query = "SELECT id FROM items JOIN responses USING (id) WHERE item = ? ORDER BY used DESC LIMIT 1"

        def holder(item_id: str, database: sqlite3.Connection) -> str | None:
            row = database.execute(query, (item_id,)).fetchone()
            return None if row is None else str(row[0])

        found: dict[str, dict[str, Any]] = {}
        for item_id in reversed(ids):  # the conversation up to the last one has most of the others
            if item_id in found:
                continue
            response_id = await self._do(partial(holder, item_id))
            if response_id is not None and (stored := await self.find(response_id)) is not None:
                found |= {item["id"]: item for item in stored.conversation if _is_named(item)}
        return {item_id: found[item_id] for item_id in ids if item_id in found}

    async def add_events(self, response_id: str, number: int, events: Sequence[bytes]) -> None:
        """Keeps further events of a response that is stored and runs; `number`: of the first of them."""

        def write(database: sqlite3.Connection) -> None:
            size = sum(map(len, events))
            change = "UPDATE responses SET size = size + ? WHERE id = ?"
            if not database.execute(change, (size, response_id)).rowcount:
                return  # it was deleted
            rows = [(response_id, number + place, data) for place, data in enumerate(events)]
            database.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
            self._make_room(database)

        await self._do(write)

    async def events(self, response_id: str, number: int) -> tuple[list[bytes], bool]:
        """(the kept events from `number` on, whether more may come)."""
        goes_on = self._mark(response_id).exists()  # before the look at the events, of which the last is kept earlier
        query = "SELECT data FROM events WHERE id = ? AND number >= ? ORDER BY number LIMIT ?"
        values = (response_id, number, _MAX_EVENTS)
        rows = await self._do(lambda database: database.execute(query, values).fetchall())
        return [data for (data,) in rows], goes_on or len(rows) == _MAX_EVENTS

    async def cancel(self, response_id: str) -> None:
        """Asks the process that computes it to end it."""
        await self._do(
            lambda database: database.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (response_id,))
        )

    async def is_cancelled(self, response_id: str) -> bool:
        """True also for a deleted response."""
        query = "SELECT cancelled FROM responses WHERE id = ?"
        row = await self._do(lambda database: database.execute(query, (response_id,)).fetchone())
        return row is None or bool(row[0])

    async def note_ended(self, response_id: str) -> None:
        """It is no longer computed, whether or not its result could be kept: a full disk still allows removing a
        file."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._mark(response_id).unlink, True)

    async def delete(self, response_id: str) -> bool:
        """False if there was none."""
        query = "DELETE FROM responses WHERE id = ?"
        return bool(await self._do(lambda database: database.execute(query, (response_id,)).rowcount))

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _mark(self, response_id: str) -> Path:
        """A file that exists while a background response is computed."""
        return self._path.with_name(f"{self._path.name}.{response_id}.running")

    def _make_room(self, database: sqlite3.Connection) -> None:
        while database.execute("SELECT bytes FROM total").fetchone()[0] > self._max_bytes:
            oldest = "SELECT id FROM responses ORDER BY used LIMIT 1"
            if not database.execute(f"DELETE FROM responses WHERE id = ({oldest})").rowcount:
                break

    async def _do(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        return await asyncio.to_thread(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with self._lock, self._transaction() as database:
            return work(database)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._database is None:
            self._database = self._open()
        with self._database:  # commits, or rolls back
            yield self._database

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_WAIT_SECONDS, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")  # it need not survive a machine crash
            database.executescript(_TABLES)
        except sqlite3.Error:
            database.close()
            raise
        return database


def _is_named(item: dict[str, Any]) -> bool:
    return isinstance(item.get("id"), str)


def _failed(message: str) -> dict[str, Any]:
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def _is_alive(process_id: int) -> bool:
    """True also for 0: nobody computes it any more."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
