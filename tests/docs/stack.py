"""A machine of its own for the documents' commands: a network namespace, so that the ports they name are free."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block

PORTS = (8000, 8001, 8002, 8003, 9000)
START_SECONDS = 240.0  # a busy machine; an idle one needs ten
STOP_SECONDS = 60.0
BLOCK_SECONDS = 240.0

# Switches the loopback interface of a new namespace on (SIOCSIFFLAGS, IFF_UP), then lives as long as its input.
_KEEPER = """
import fcntl, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))
print("up", flush=True)
sys.stdin.read()
"""


class Namespace:
    """Runs commands in one network namespace, or in this machine's own where the kernel allows none."""

    def __init__(self, enter: Sequence[str]) -> None:
        self._enter = list(enter)

    def command(self, *words: str) -> list[str]:
        return [*self._enter, *words]

    def run(
        self, words: Sequence[str], environment: dict[str, str], seconds: float = BLOCK_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end, without input; stdout and stderr together in `stdout`."""
        process = subprocess.Popen(
            self.command(*words),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"not over after {seconds:g} s:\n{output[-3000:]}")
        return subprocess.CompletedProcess(words, process.returncode, output)


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """A new one; skips the test where there is none to be had and somebody else uses the documents' ports."""
    as_root = os.geteuid() == 0
    unshare = ["unshare", "--net"] if as_root else ["unshare", "--net", "--map-root-user"]
    keeper = None
    if shutil.which("unshare") and shutil.which("nsenter"):
        keeper = subprocess.Popen(
            [*unshare, sys.executable, "-c", _KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    try:
        if keeper is not None and keeper.stdout is not None and keeper.stdout.readline() == "up\n":
            user = [] if as_root else ["--user", "--preserve-credentials"]
            yield Namespace(["nsenter", "--target", str(keeper.pid), "--net", *user, "--"])
        else:
            taken = [port for port in PORTS if not _is_free(port)]
            if taken:
                pytest.skip(f"the documents' ports are in use ({taken}), and there are no network namespaces")
            yield Namespace([])
    finally:
        if keeper is not None:
            keeper.kill()
            keeper.communicate()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def served(place: Namespace, block: Block, environment: dict[str, str], log: Path) -> Iterator[None]:
    """What the block serves, ready; at the end Ctrl-C, and it has to end well."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    with log.open("wb") as output:
        process = subprocess.Popen(
            place.command("bash", "-euo", "pipefail", "-c", block.code),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def said() -> str:
        return f"{block.name}:\n{log.read_text(errors='replace')[-4000:]}"

    try:
        deadline = time.monotonic() + START_SECONDS
        ready = ["curl", "-s", "127.0.0.1:8003/health/ready"]
        while place.run(ready, environment).returncode:
            assert process.poll() is None, said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.5)
        yield
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(STOP_SECONDS) in (0, 130), said()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
