"""One process that compiles grammars, as the engine core holds it."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

import msgspec

from minisgl_backend.grammar.compiler import Answer
from minisgl_backend.process.spawn import start_child
from minisgl_backend.request import Grammar

# Of a process, which imports torch since xgrammar does: it needs no GPU, and tvm-ffi is to build nothing for torch.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1"}
START_S = 120.0  # for a process to be ready: it imports for seconds, from a slow disk for longer


class CompilerProcess:
    """One process, which compiles one grammar after the other. Used by the thread that started it, but for `kill`."""

    def __init__(self) -> None:
        """Starts it; it ends with the thread that does. Raises OSError where that cannot be done."""
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        try:
            with theirs:
                arguments, fds = ["--fd", str(theirs.fileno())], (theirs.fileno(),)
                self._popen = start_child(
                    "minisgl_backend.grammar.compiler", arguments, fds=fds, tied=True, environment=ENVIRONMENT
                )
        except OSError:
            self._connection.close()
            raise

    def wait_ready(self, tokenizer_info: str) -> None:
        """Hands over the tokenizer, as xgrammar's JSON. Raises EOFError or OSError where the process is not ready."""
        for message in (tokenizer_info.encode(), None):
            if not self._connection.poll(START_S):
                raise EOFError(f"it was not ready after {START_S:g} s")
            self._connection.recv_bytes()
            if message is not None:
                self._connection.send_bytes(message)

    def begin(self, grammar: Grammar) -> None:
        """Raises OSError where the process has died."""
        self._connection.send_bytes(msgspec.msgpack.encode(grammar))

    def answers_within(self, seconds: float) -> bool:
        """True as well where it has died."""
        return self._connection.poll(seconds)

    def answer(self) -> Answer:
        """Raises EOFError or OSError where the process has died."""
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)

    def kill(self) -> None:
        """Any thread may; whoever waits for an answer hears that it has died."""
        self._popen.kill()

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._connection.close()
