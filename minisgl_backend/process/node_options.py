"""Which of several nodes this is: by the command line, otherwise by a launcher's variables. Standard library only.

A launcher's variables count only where `--nodes` is given, so that a single server in a multi-node job stays single.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.config import OPTIONS
from minisgl_backend.errors import ConfigError

PORT = 29600  # of the rendezvous, where a launcher gives only the host
SECRET = "MINISGL_RENDEZVOUS_SECRET"
SECRET_FILE = "MINISGL_RENDEZVOUS_SECRET_FILE"
LEAST_SECRET = 16  # characters


@dataclass(frozen=True)
class LauncherNode:
    """What a launcher's variables say about this process."""

    launcher: str
    nodes: int
    node_rank: int
    address: str  # node 0's, HOST:PORT


def read_launcher(environ: Mapping[str, str]) -> LauncherNode | None:
    """None outside of LeaderWorkerSet, torchrun and srun. Raises ConfigError if they start several processes on a
    node."""
    if "LWS_GROUP_SIZE" in environ:
        host = environ.get("LWS_LEADER_ADDRESS", "")
        return _launcher_node("LeaderWorkerSet", environ, "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", f"{host}:{PORT}")
    if "TORCHELASTIC_RUN_ID" in environ:
        _check_one_each("torchrun", "--nproc-per-node", environ.get("LOCAL_WORLD_SIZE", "1"))
        # torchrun itself listens on MASTER_PORT.
        port = _number("torchrun", "MASTER_PORT", environ.get("MASTER_PORT", str(PORT - 1)))
        address = f"{environ.get('MASTER_ADDR', '')}:{port + 1}"
        return _launcher_node("torchrun", environ, "GROUP_WORLD_SIZE", "GROUP_RANK", address)
    if "SLURM_STEP_NODELIST" in environ:
        nodes, tasks = environ.get("SLURM_STEP_NUM_NODES", "1"), environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != nodes:
            raise ConfigError(f"srun's --ntasks is {tasks}; allowed with {nodes} nodes: {nodes}, one task on each")
        address = f"{_first_host(environ['SLURM_STEP_NODELIST'])}:{PORT}"
        return _launcher_node("srun", environ, "SLURM_STEP_NUM_NODES", "SLURM_NODEID", address)
    return None


def _launcher_node(launcher: str, environ: Mapping[str, str], nodes: str, node_rank: str, address: str) -> LauncherNode:
    count, rank = (_number(launcher, name, environ.get(name, "")) for name in (nodes, node_rank))
    return LauncherNode(launcher, count, rank, address)


def _number(launcher: str, name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; {launcher} sets it to a number")
    return int(text)


def _check_one_each(launcher: str, option: str, given: str) -> None:
    if given != "1":
        raise ConfigError(f"{launcher}'s {option} is {given}; allowed: 1, which starts all ranks of its node")


def _first_host(nodes: str) -> str:
    """The first host of Slurm's node list: `gpu[003-006,010],b1` begins with gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


def fill_in(values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Completes the command line's `nodes`, `node_rank` and `rendezvous` (texts; None: not given) from the launcher.

    Raises ConfigError if the command line and the launcher disagree, or if neither says which node this is.
    """
    nodes, node_rank, rendezvous = (values[name] for name in ("nodes", "node_rank", "rendezvous"))
    count = 1 if nodes is None else OPTIONS["nodes"].parse(nodes)
    if count == 1 or (node_rank is not None and rendezvous is not None):
        return dict(values)
    launched = read_launcher(environ)
    if launched is not None:
        if count != launched.nodes:
            raise ConfigError(
                f"nodes is {count}; allowed under {launched.launcher}, which has {launched.nodes}: {launched.nodes}"
            )
        node_rank = launched.node_rank if node_rank is None else node_rank
        rendezvous = rendezvous or launched.address
    if node_rank is None:
        raise ConfigError(
            f"--node-rank is unset; allowed with nodes {count}: 0 on the machine that serves, 1 and up on the others"
        )
    return {**values, "node_rank": node_rank, "rendezvous": rendezvous}


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The secret shared by all nodes. Raises ConfigError if there is none; its messages never contain the secret."""
    name, text = SECRET, environ.get(SECRET, "").strip()
    if not text and (file := environ.get(SECRET_FILE)):
        name = SECRET_FILE
        try:
            text = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{name} is {file!r}, which cannot be read: {error}") from None
    if len(text) < LEAST_SECRET:
        given = f"has {len(text)} characters" if text else f"is unset, and so is {SECRET_FILE}"
        raise ConfigError(
            f"{name} {given}; allowed with several nodes: {LEAST_SECRET} characters or more, the same on all of them "
            "(openssl rand -hex 32)"
        )
    try:
        return text.encode()
    except UnicodeError:  # the system passes on bytes that are not text
        raise ConfigError(f"{name} is no UTF-8; allowed with several nodes: text, the same on all of them") from None
