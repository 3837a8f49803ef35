"""The engine core's side of its helper processes for grammars."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from minisgl_backend.grammar.compiler_reply import CompilerReply
from minisgl_backend.grammar.light_import import ENVIRONMENT
from minisgl_backend.grammar.tokenizer_info import Description, TokenizerSource
from minisgl_backend.process.spawn import start_child
from minisgl_backend.request import Grammar

START_S = 300.0  # timeout of a start: imports take seconds, from a slow disk longer


class HelperProcess:
    """One process and the connection to it. Used by the thread that started it, except for `kill`."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        """Starts the process, which ends with the thread that started it. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        try:
            with theirs:
                # Without a GPU: a helper that does import torch must not open one.
                environment = {"CUDA_VISIBLE_DEVICES": "", **ENVIRONMENT}
                self._popen = start_child(
                    module,
                    [*arguments, "--fd", str(theirs.fileno())],
                    fds=(theirs.fileno(),),
                    tied=True,
                    environment=environment,
                )
        except OSError:
            self._connection.close()
            raise

    def receive(self) -> bytes:
        """Raises EOFError or OSError if the process has died, or has sent nothing for START_S."""
        if not self._connection.poll(START_S):
            raise EOFError(f"it was not ready after {START_S:g} s")
        return self._connection.recv_bytes()

    def kill(self) -> None:
        """Thread-safe; a thread that waits for a reply gets an error."""
        self._popen.kill()

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._connection.close()


class TokenizerProcess(HelperProcess):
    """Describes the model's tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        """Raises OSError."""
        super().__init__("minisgl_backend.grammar.tokenizer_info", ["--source", msgspec.json.encode(source).decode()])

    def description(self) -> Description:
        """Raises EOFError or OSError if the process has died."""
        return msgspec.msgpack.decode(self.receive(), type=Description)


class CompilerProcess(HelperProcess):
    """Compiles one grammar after the other."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__("minisgl_backend.grammar.compiler")

    def wait_ready(self, tokenizer_info: str) -> None:
        """Sends the tokenizer, as xgrammar's JSON. Raises EOFError or OSError if the process does not become ready."""
        self.receive()
        self._connection.send_bytes(tokenizer_info.encode())
        self.receive()

    def begin(self, grammar: Grammar) -> None:
        """Raises OSError if the process has died."""
        self._connection.send_bytes(msgspec.msgpack.encode(grammar))

    def replies_within(self, seconds: float) -> bool:
        """Whether a reply can be read; also True if the process has died."""
        return self._connection.poll(seconds)

    def reply(self) -> CompilerReply:
        """Raises EOFError or OSError if the process has died."""
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=CompilerReply)
