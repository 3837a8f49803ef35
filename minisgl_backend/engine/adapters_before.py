"""The adapters that an engine core begins with when it starts again, and the room that it had for others."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from minisgl_backend.adapters.config import LoraConfig
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.adapters import Source
from minisgl_backend.errors import ConfigError
from minisgl_backend.ipc.adapter_table import AdapterTable, LoadedAdapter
from minisgl_backend.models.folder import adapter_path

log = logging.getLogger(__name__)


def loaded_before(config: EngineConfig, socket_dir: Path) -> tuple[EngineConfig, dict[str, Source]]:
    """What a core of this server had loaded before: those of the options that still are, and where the others lie.

    A folder that has gone, or has another adapter now, does not end this start as it would the first one: it is among
    the others, and a request that names it is told. The options' room stays, as what was loaded since needs it.
    """
    if (table := AdapterTable(socket_dir).read()) is None:
        return config, {}
    at_start = config.adapter_folders
    kept = [name for name, one in table.items() if at_start.get(name) == one.folder and _is_as_loaded(name, one)]
    sources = {
        name: Source(adapter_path(one.folder), bytes.fromhex(one.digest))
        for name, one in table.items()
        if name not in kept
    }
    adapters = ",".join(f"{name}={at_start[name]}" for name in kept)
    if not config.adapter_rank:  # none comes while serving
        return replace(config, adapters=adapters), sources
    folders = {*at_start.values(), *(one.folder for one in table.values())}
    room = replace(
        config,
        adapters=adapters,
        max_adapters=config.num_adapter_slots,
        max_loaded_adapters=config.most_loaded_adapters,
        max_lora_rank=max(config.adapter_rank, *_ranks(folders)),
    )
    return room, sources


def _is_as_loaded(name: str, loaded: LoadedAdapter) -> bool:
    from minisgl_backend.adapters.tensors import AdapterTensors  # imports torch, which a first start does later

    try:
        digest = AdapterTensors.read(Path(adapter_path(loaded.folder))).digest.hex()
    except (ConfigError, OSError) as error:
        log.error("adapter %r is not served: %s", name, error)
        return False
    if loaded.digest not in ("", digest):
        log.error("adapter %r is not served: %s has changed since it was loaded", name, loaded.folder)
        return False
    return True


def _ranks(folders: Iterable[str]) -> list[int]:
    """Of those that can be read, as their configurations say; 0 is among them."""
    found = [0]
    for folder in folders:
        try:
            found.append(LoraConfig.read(Path(adapter_path(folder))).largest_rank)
        except (ConfigError, OSError):
            log.debug("%s has no adapter now", folder)
    return found
