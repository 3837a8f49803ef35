"""Which adapter a request of Triton's models names: by its name, by TensorRT-LLM's names of it, or by its tensors."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from minisgl_backend.adapters.roots import TASK_FILE, TASK_PREFIX
from minisgl_backend.adapters.task_modules import TASK_MODULES
from minisgl_backend.config import MAX_RANK
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.ipc.adapter_table import AdapterTable, ServedAdapters
from minisgl_backend.serving.fields import shown

MOST_LAYERS = 1024
LOCK_S = 10.0
NO_TASKS = "name an adapter of the server by lora_name, or start it with max_adapter_tasks"


class AdapterTasks:
    """Adapters that clients of TensorRT-LLM have sent, as folders that the engine cores read: the latest ones that were
    asked for. Folders are named by what is in them, so that an id never stands for two adapters at a time."""

    def __init__(self, root: Path, most: int, most_bytes: int) -> None:
        """most: ids that are kept; most_bytes: of the tensors of one, which are hashed and written while other
        requests wait."""
        self._root, self._ids, self._most, self._most_bytes = root, root / "ids", most, most_bytes
        self._lock = AdapterTable(root)

    def name_of(self, task: int, weights: npt.NDArray[Any] | None, config: npt.NDArray[Any] | None) -> str:
        """The adapter's name at the engine. Raises InvalidRequestError, and CapacityError where it cannot be kept."""
        if (weights is None) != (config is None):
            raise InvalidRequestError(
                "lora_weights and lora_config belong together; allowed: both, or lora_task_id alone"
            )
        try:
            self._ids.mkdir(parents=True, exist_ok=True, mode=0o700)
            if weights is None or config is None:
                return self._known(task)
            content = save(_checked(weights, config, self._most_bytes))
            with self._lock.changing(LOCK_S):
                return self._keep(task, content)
        except OSError as error:
            raise CapacityError(f"lora_weights cannot be kept: {error.strerror or error}; try again later") from None

    def _known(self, task: int) -> str:
        path = self._ids / str(task)
        try:
            name = path.read_text(encoding="ascii")
            os.utime(path)
        except FileNotFoundError:
            raise InvalidRequestError(
                f"lora_task_id is {task}, which is not kept (any more); allowed: with lora_weights and lora_config"
            ) from None
        return name

    def _keep(self, task: int, content: bytes) -> str:
        name, path = f"{TASK_PREFIX}{hashlib.blake2b(content, digest_size=16).hexdigest()}", self._ids / str(task)
        if path.exists():
            if self._known(task) != name:
                raise InvalidRequestError(
                    f"lora_task_id is {task}, which has other weights; allowed: these, or another id"
                )
            return name
        self._drop_oldest()
        if not (folder := self._root / name).exists():
            new = self._root / f"new-{os.getpid()}-{time.monotonic_ns()}"
            new.mkdir(mode=0o700)
            try:
                (new / TASK_FILE).write_bytes(content)
                new.rename(folder)
            except OSError:
                shutil.rmtree(new, ignore_errors=True)
                raise
        path.write_text(name, encoding="ascii")
        return name

    def _drop_oldest(self) -> None:
        """Makes room for one more."""
        ids = sorted(self._ids.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in ids[: max(0, len(ids) + 1 - self._most)]:
            path.unlink()
        kept = {path.read_text(encoding="ascii") for path in self._ids.iterdir()}
        for folder in self._root.glob(f"{TASK_PREFIX}*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)


class AdapterFields:
    """Of one server."""

    def __init__(self, served: ServedAdapters | None = None, tasks: AdapterTasks | None = None) -> None:
        self._served, self._tasks = served, tasks

    def name_of(self, fields: Mapping[str, Any]) -> str | None:
        """None: the request is the model's own. Raises InvalidRequestError, CapacityError."""
        name, path = fields.get("lora_name") or None, fields.get("lora_path") or None
        if (source := fields.get("lora_ckpt_source") or "hf") != "hf":
            raise InvalidRequestError(f"lora_ckpt_source is {shown(source)}; allowed: hf, a folder as PEFT writes it")
        if path is not None:
            name = self._named(name, path)
        task, sent = fields.get("lora_task_id"), [fields.get(name) for name in ("lora_weights", "lora_config")]
        weights, config = (None if one is None or not one.size else one for one in sent)
        if not task and weights is None and config is None:
            if fields.get("lora_id") and name is None:
                raise InvalidRequestError(
                    "lora_id stands alone; allowed: with lora_name or lora_path, which say which it is"
                )
            return name
        if not task:  # 0 alone is what some clients send for none
            raise InvalidRequestError(
                f"lora_task_id is {'unset' if task is None else 0} with lora_weights or lora_config; allowed: 1 or more"
            )
        if name is not None:
            raise InvalidRequestError("lora_name and lora_task_id are both given; allowed: one of them")
        if self._tasks is None:
            raise InvalidRequestError(f"lora_task_id is not served: {NO_TASKS}")
        return self._tasks.name_of(task, weights, config)

    def _named(self, name: str | None, path: str) -> str:
        """The adapter in that folder; no folder is read that is none of the server's."""
        folders = {} if self._served is None else self._served.folders()
        wanted = os.path.normpath(path)
        found = [one for one, folder in folders.items() if os.path.normpath(folder) == wanted and name in (None, one)]
        if not found:
            of = "" if name is None else f", of adapter {shown(name)}"
            raise InvalidRequestError(
                f"lora_path is {shown(path)}; allowed: the folder of an adapter that is served{of}"
            )
        return found[0]


def _checked(weights: npt.NDArray[Any], config: npt.NDArray[Any], most_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Both by name, as float16 [modules, numbers] and int32 [modules, 3]. Raises InvalidRequestError."""
    weights, config = weights.reshape(-1, weights.shape[-1]), config.reshape(-1, config.shape[-1])
    if config.shape[1] != 3 or len(config) != len(weights):
        raise InvalidRequestError(
            f"lora_config has shape {list(config.shape)} and lora_weights {list(weights.shape)}; allowed: [modules, 3] "
            "(module, layer, rank) and [modules, numbers]"
        )
    if (size := 2 * weights.size) > most_bytes or len(config) > MOST_LAYERS * len(TASK_MODULES):
        raise InvalidRequestError(
            f"lora_weights has {size} bytes in {len(config)} rows; allowed: up to {most_bytes} bytes, as of all "
            f"modules at max_lora_rank, in up to {MOST_LAYERS * len(TASK_MODULES)} rows"
        )
    for module, layer, rank in config.tolist():
        if module not in TASK_MODULES or not 0 <= layer < MOST_LAYERS or not 1 <= rank <= MAX_RANK:
            raise InvalidRequestError(
                f"lora_config has module {module}, layer {layer}, rank {rank}; allowed: modules "
                f"{', '.join(map(str, TASK_MODULES))} (of attention and MLP), the model's layers, ranks 1 to {MAX_RANK}"
            )
    return {
        "lora_weights": np.ascontiguousarray(weights, dtype=np.float16),
        "lora_config": np.ascontiguousarray(config, dtype=np.int32),
    }
