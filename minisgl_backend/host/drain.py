"""`python -m minisgl_backend.host.drain`: to be run before SIGTERM if tritonserver runs without scripts/serve.sh.

Engine fronts refuse new requests from now on, and finish their running ones; those still running at the time limit end
with UNAVAILABLE. Under Kubernetes this is a preStop hook. tritonserver 2.51 cannot drain by itself: at SIGTERM the
models behind an ensemble take no more work, so that all streams stall, and a model's own `finalize` is called only once
nothing is in flight.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minisgl_backend.ipc.channel import live_socket_directories
from minisgl_backend.process.status_files import ask_to_drain, fronts_not_drained, has_fronts

LAST_CHUNK_SECONDS = 0.5  # from the engine's last chunk through the detokenizer to the client
ANSWER_SECONDS = 5.0  # after the time limit; a front on an idle processor needs less than a tenth of one
_LOOK_SECONDS = 0.05


def drain(directories: Sequence[Path], seconds: float) -> bool:
    """Waits until the fronts of these socket directories are idle. False if one does not answer in time."""
    deadline = time.monotonic() + seconds
    for directory in directories:
        ask_to_drain(directory, deadline)
    while any(fronts_not_drained(directory) for directory in directories):
        if time.monotonic() > deadline + ANSWER_SECONDS:
            return False
        time.sleep(_LOOK_SECONDS)
    time.sleep(LAST_CHUNK_SECONDS)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 drained, 1 no server or one that does not answer, 2 wrong options."""
    parser = argparse.ArgumentParser(
        prog="python -m minisgl_backend.host.drain",
        description="Let this user's tritonserver finish its requests and take no new ones; send SIGTERM afterwards.",
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="for what runs; it ends then [%(default)s]")
    parser.add_argument("--pid", type=int, help="of one tritonserver, where this user runs several [all]")
    options = parser.parse_args(arguments)
    found = live_socket_directories()
    if options.pid is not None:
        found = {pid: directory for pid, directory in found.items() if pid == options.pid}
    directories = [directory for directory in found.values() if has_fronts(directory)]
    if not directories:
        print("no server of this user has an engine", file=sys.stderr)
        return 1
    if not drain(directories, options.seconds):
        print("the server does not answer", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
