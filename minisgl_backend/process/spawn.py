"""Starts the engine's processes, what each does first, how it ended: the same Python and package, no orphans."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisgl_backend.environment import ADMIN_KEY
from minisgl_backend.process.resources import torch_defaults, usual_stack_limit

PR_SET_PDEATHSIG = 1
KILLED = -signal.SIGKILL
TIED = "--tied"  # tells a child that the thread that started it lives as long as the parent


def start_child(
    module: str,
    arguments: Sequence[str],
    *,
    fds: tuple[int, ...],
    tied: bool,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments`. The child ends when its standard input is closed.

    `fds` stay open in the child under the same numbers. `tied`: the calling thread lives as long as this process, so
    the kernel may kill the child when that thread ends. `environment`: variables in addition to those of this process.
    """
    command = [python_executable(), "-m", module, *arguments, *([TIED] if tied else [])]
    variables = {**_environment(), **(environment or {})}
    with usual_stack_limit():
        # Output goes to stderr: standard output may belong to the program that started this process.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=fds, env=variables)


def _environment() -> dict[str, str]:
    """This process's environment, set so that a child finds the same package and shares the CPU with other programs.
    The admin key is not in it: only the engine's front compares it, which tritonserver starts.
    """
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if name != ADMIN_KEY}
    return {**kept, **torch_defaults(os.environ), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def begin_child(name: str, log_level: str, *, tied: bool) -> None:
    """To be called first in a child: logs to stderr under `name`, ignores Ctrl-C, ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children in order
    if tied:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    log_to_stderr(name, log_level)


def log_to_stderr(name: str, level: str) -> None:
    """Logs this package's messages to stderr, with the process's name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname).1s %(message)s", "%H:%M:%S"))
    package = logging.getLogger("minisgl_backend")
    package.handlers = [handler]
    package.setLevel(level)
    package.propagate = False


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def python_executable() -> str:
    """The interpreter of this environment, even where `sys.executable` is an embedding program or empty."""
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    candidate = Path(sys.prefix) / "bin" / "python3"
    return str(candidate) if candidate.exists() else (shutil.which("python3") or "python3")


def describe_end(status: int) -> str:
    """`status` as `subprocess` reports it: a negative one is a signal."""
    if status == KILLED:  # this project kills only processes that hang, and logs it then
        return "signal 9: it was killed, most likely for want of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
