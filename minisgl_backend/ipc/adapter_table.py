"""Which adapters were loaded by name: a file of the socket directory, since fronts, the tokenizer and an engine core
that starts again must know the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from minisgl_backend.adapters.roots import names_below
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import CapacityError

LIST_AGAIN_S = 10.0  # an entry may have become an adapter
LOCK_S = 60.0  # for which a change waits for another one at most


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter, and what it was when it was loaded."""

    folder: str
    digest: str  # in hex


def task_root(socket_dir: Path) -> Path:
    """Where the adapters are that requests bring along."""
    return Path(os.path.realpath(socket_dir)) / "adapter-tasks"


Table = dict[str, LoadedAdapter]  # by name


class AdapterTable:
    """The file of one server; None until the first change, when the options alone say what is loaded."""

    def __init__(self, socket_dir: Path) -> None:
        self._path = socket_dir / "adapters.json"
        self._lock = socket_dir / "adapters-lock"

    def read(self) -> Table | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Table)
        except FileNotFoundError:
            return None

    def write(self, table: Table) -> None:
        """By whoever is `changing` it. Readers see the old file or the new one."""
        _replace(self._path, msgspec.json.encode(table))

    @contextlib.contextmanager
    def changing(self, wait_s: float = LOCK_S) -> Iterator[None]:
        """No other process or thread changes it meanwhile. Raises CapacityError."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise CapacityError("another adapter is being loaded; try again later") from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(lock)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


class AdapterStates:
    """What the engine cores have of each adapter: another file there, written by one front."""

    def __init__(self, socket_dir: Path) -> None:
        self._path = socket_dir / "adapter-states.json"
        self._written: dict[str, str] = {}

    def show(self, states: dict[str, str]) -> None:
        """By name: "slot" or "host"."""
        if states != self._written:
            _replace(self._path, msgspec.json.encode(states))
            self._written = states

    def read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}


class ServedAdapters:
    """Which adapters a request may name, and what the engine cores have of them."""

    def __init__(self, config: EngineConfig, socket_dir: Path) -> None:
        self._config, self._table, self._states = config, AdapterTable(socket_dir), AdapterStates(socket_dir)
        self._listed: dict[str, str] = {}
        self._listed_at = (0, -LIST_AGAIN_S)  # when the folder was changed, and looked at

    def states(self) -> dict[str, str]:
        """By name; others are on the disk alone."""
        return self._states.read()

    def folders(self) -> dict[str, str]:
        """By name."""
        table, root = self._table.read(), self._config.adapter_dir
        found = self._config.adapter_folders if table is None else {name: one.folder for name, one in table.items()}
        return found if root is None else self._below(Path(root)) | found

    def _below(self, root: Path) -> dict[str, str]:
        """Looked for again once an entry of the folder has come or gone, and after a while."""
        try:
            changed = root.stat().st_mtime_ns
        except OSError:
            changed = 0
        now = time.monotonic()
        if changed != self._listed_at[0] or now > self._listed_at[1] + LIST_AGAIN_S:
            self._listed = {name: str(root / name) for name in names_below(root)}
            self._listed_at = changed, now
        return self._listed
