"""Commands of whoever has the admin key: adapters are loaded, unloaded and listed.

Here alone the key is compared. What a command changes is told to other processes (the table of adapters) once every
engine core can serve it, so that an answer says what has happened everywhere.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from minisgl_backend.adapters.roots import NoAdapter, OutsideRoots, below
from minisgl_backend.config import ADAPTER_NAMES, EngineConfig, is_adapter_name
from minisgl_backend.delivery.engine_client import EngineClient
from minisgl_backend.errors import CapacityError, EngineDeadError, MinisglError
from minisgl_backend.ipc.adapter_table import AdapterTable, LoadedAdapter, Table
from minisgl_backend.ipc.messages import Done, DropAdapter, Failed, ReadAdapter, ServeAdapter, UnloadAdapter

MOST_COMMANDS = 16  # that wait
READ_S = 600.0  # for which a command waits for the engine cores to read an adapter
ANSWER_S = 60.0  # and to do what takes no time, between two steps

_LOGGER = logging.getLogger(__name__)


class LoadCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="load_adapter"):
    """`path` is below `adapter_dir`, as it is or relative to it; without one it is the name."""

    name: str
    path: str = ""
    replace: bool = False  # also where the name stands for an adapter already


class UnloadCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="unload_adapter"):
    name: str


class ListCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="list_adapters"):
    pass


Command = LoadCommand | UnloadCommand | ListCommand


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command was answered with; `status` is one of HTTP's."""

    status: int
    message: str
    code: Literal["", "unauthorized", "outside_roots", "not_found", "already_loaded", "refused"] = ""
    adapters: dict[str, str] = {}  # folders by name, of all that are loaded

    @property
    def success(self) -> bool:
        return self.status == 200


class _Refused(MinisglError):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class AdminCommands:
    """The commands of one front, one after the other, on a thread of its own."""

    def __init__(
        self, config: EngineConfig, client: EngineClient, socket_dir: Path, *, key: str, reserved: Collection[str]
    ) -> None:
        """`key`: "": there is none, and each command is refused. `reserved`: names that no adapter may have."""
        self._key = hashlib.sha256(key.encode()).digest() if key else b""
        self._roots = [] if config.adapter_dir is None else [Path(config.adapter_dir)]
        self._at_start = config.adapter_folders
        self._reserved = frozenset(reserved)
        self._client, self._table = client, AdapterTable(socket_dir)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._lock = threading.Lock()
        self._waiting = 0
        self.num_refused = 0  # tries with a wrong key, or none

    def submit(self, command: str, key: str, answer: Callable[[CommandResult], None]) -> None:
        """Calls `answer` once, on any thread. `command`: JSON of a Command."""
        if not self._is_key(key):
            with self._lock:
                self.num_refused += 1
                count = self.num_refused
            if not count & (count - 1):  # tries may be many
                _LOGGER.warning("commands with a wrong admin key, or none, were refused: %d so far", count)
            wrong = "the admin key is wrong" if key else "this needs the admin key"
            answer(CommandResult(status=401, code="unauthorized", message=f"{wrong}; allowed: that of --admin-key"))
            return
        with self._lock:
            is_full = self._waiting >= MOST_COMMANDS
            self._waiting += not is_full
        if is_full:
            answer(CommandResult(status=503, code="refused", message="too many commands wait; try again later"))
            return
        self._worker.submit(self._run, command, answer)

    def close(self) -> None:
        """The command that runs ends; those that wait are not begun."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _is_key(self, given: str) -> bool:
        # Digests: the comparison takes as long for a key of another length.
        digest = hashlib.sha256(given.encode("utf-8", "replace")).digest()
        return secrets.compare_digest(digest, self._key) if self._key else False

    def _run(self, command: str, answer: Callable[[CommandResult], None]) -> None:
        try:
            result = self._do(msgspec.json.decode(command, type=Command))
        except msgspec.MsgspecError as error:
            result = CommandResult(status=400, code="refused", message=f"command is not valid: {error}")
        except _Refused as error:
            result = CommandResult(status=error.status, code=error.code, message=str(error))  # type: ignore[arg-type]
        except (CapacityError, EngineDeadError) as error:
            result = CommandResult(status=503, code="refused", message=str(error))
        except Exception as error:
            _LOGGER.exception("a command failed")
            result = CommandResult(status=500, code="refused", message=f"the command failed ({type(error).__name__})")
        finally:
            with self._lock:
                self._waiting -= 1
        answer(result)

    def _do(self, command: Command) -> CommandResult:
        if isinstance(command, ListCommand):
            return self._result("", self._loaded())
        if command.name in self._reserved or not is_adapter_name(command.name):
            why = "which is the model's own name" if command.name in self._reserved else f"allowed: {ADAPTER_NAMES}"
            raise _Refused(400, "refused", f"name is {command.name[:200]!r}; {why}")
        with self._table.changing():
            if isinstance(command, LoadCommand):
                return self._load(command, self._loaded())
            return self._unload(command.name, self._loaded())

    def _load(self, command: LoadCommand, loaded: Mapping[str, LoadedAdapter]) -> CommandResult:
        name = command.name
        if name in loaded and not command.replace:
            raise _Refused(400, "already_loaded", f"adapter {name!r} is loaded already; allowed: with replace")
        folder, cores = self._folder(command.path or name), self._client.commands
        read, serve = cores.new_id(), cores.new_id()
        try:
            answers = self._all_done(read, lambda front: ReadAdapter(front=front, id=read, folder=folder), READ_S)
            if len({answer.result for answer in answers}) > 1:
                raise _Refused(409, "refused", f"{folder} has changed while it was read; try again")
            digest = answers[0].result
            # Before the cores serve it: one that starts again meanwhile finds it there.
            table = {**loaded, name: LoadedAdapter(folder, digest)}
            self._table.write(table)
        except (MinisglError, OSError):
            drop = cores.new_id()
            cores.ask_all(drop, lambda front: DropAdapter(front=front, id=drop, read=read), ANSWER_S)
            raise
        _check_answered(
            cores.ask_all(
                serve,
                lambda front: ServeAdapter(front=front, id=serve, read=read, name=name, folder=folder, digest=digest),
                ANSWER_S,
            )
        )
        _LOGGER.info("adapter %r was loaded from %s", name, folder)
        return self._result(f"adapter {name!r} is loaded", table)

    def _unload(self, name: str, loaded: Mapping[str, LoadedAdapter]) -> CommandResult:
        table = {other: one for other, one in loaded.items() if other != name}
        if name in loaded:
            self._table.write(table)
        number = self._client.commands.new_id()
        answers = self._client.commands.ask_all(
            number, lambda front: UnloadAdapter(front=front, id=number, name=name), ANSWER_S
        )
        _check_answered(answers)
        # Cores may have read it for a request, each for itself.
        if name not in loaded and not any(isinstance(answer, Done) for answer in answers):
            raise _Refused(404, "not_found", f"adapter {name!r} is not loaded")
        _LOGGER.info("adapter %r was unloaded", name)
        return self._result(f"adapter {name!r} is unloaded", table)

    def _folder(self, path: str) -> str:
        if not self._roots:
            raise _Refused(403, "outside_roots", "no adapter may be loaded; allowed: by a server with --adapter-dir")
        try:
            return str(below(self._roots, path))
        except OutsideRoots as error:
            raise _Refused(403, "outside_roots", f"{error}; allowed: below --adapter-dir") from None
        except NoAdapter as error:
            raise _Refused(404, "not_found", str(error)) from None

    def _all_done(self, number: int, make: Callable[[int], ReadAdapter], timeout_s: float) -> list[Done]:
        """Raises what a core answers instead."""
        answers = self._client.commands.ask_all(number, make, timeout_s)
        failed = next((answer for answer in answers if isinstance(answer, Failed)), None)
        if failed is not None:
            busy = failed.kind in (CapacityError.__name__, EngineDeadError.__name__)
            raise _Refused(503 if busy else 400, "refused", failed.message)
        return [answer for answer in answers if isinstance(answer, Done)]

    def _loaded(self) -> Table:
        table = self._table.read()
        if table is not None:
            return table
        return {name: LoadedAdapter(folder, "") for name, folder in self._at_start.items()}

    def _result(self, message: str, table: Mapping[str, LoadedAdapter]) -> CommandResult:
        return CommandResult(status=200, message=message, adapters={name: one.folder for name, one in table.items()})


def _check_answered(answers: Sequence[Done | Failed]) -> None:
    """Raises CapacityError where a core has not done yet what others have. One that is down does it as it starts."""
    late = [one for one in answers if isinstance(one, Failed) and one.kind == CapacityError.__name__]
    if late:
        raise CapacityError(f"{late[0].message}: it has not changed yet, as the others have")


def encode(result: CommandResult) -> bytes:
    """As JSON, with `success`."""
    fields: dict[str, Any] = {"success": result.success, **msgspec.to_builtins(result)}
    return msgspec.json.encode(fields)
