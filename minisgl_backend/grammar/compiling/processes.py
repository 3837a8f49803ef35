"""The engine core's side of its helper processes for grammars, and the tokenizer that they and it compile with."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.grammar.compiling.light_import import ENVIRONMENT, import_xgrammar
from minisgl_backend.grammar.compiling.reply import CompilerReply, compile_translated
from minisgl_backend.grammar.compiling.tokenizer_info import Description, TokenizerSource
from minisgl_backend.grammar.forced_text import GreedyTokenizer
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
        super().__init__(
            "minisgl_backend.grammar.compiling.tokenizer_info", ["--source", msgspec.json.encode(source).decode()]
        )

    def description(self) -> Description:
        """Raises EOFError or OSError if the process has died."""
        return msgspec.msgpack.decode(self.receive(), type=Description)


class CompilerProcess(HelperProcess):
    """Compiles one grammar after the other."""

    def __init__(self) -> None:
        """Raises OSError."""
        super().__init__("minisgl_backend.grammar.compiling.compiler")

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


@dataclass(frozen=True)
class Tokenizer:
    """The model's tokenizer in xgrammar's classes."""

    xgrammar: Any  # the module
    info: Any  # TokenizerInfo
    compiler: Any  # GrammarCompiler, for grammars that are known to compile quickly


class Processes:
    """The helper processes of one engine, and what they tell of its tokenizer. Thread-safe."""

    def __init__(self, source: TokenizerSource, stubbed: Sequence[str], *, jump_forward: bool) -> None:
        """`stubbed`: packages that xgrammar imports and this process does not use; `jump_forward`: makes
        `forced_text_tokenizer` with the tokenizer."""
        self.forced_text_tokenizer: GreedyTokenizer | None = None
        self._jump_forward = jump_forward
        self._source = source
        self._stubbed = stubbed
        self._tokenizer_lock = threading.Lock()  # loading takes seconds
        self._description: str | None = None  # xgrammar's JSON of a TokenizerInfo
        self._tokenizer: Tokenizer | None = None
        # For the attributes below. Reentrant: garbage collection may close an engine on any thread.
        self._lock = threading.RLock()
        self._running: set[HelperProcess] = set()
        self._closed = False

    def close(self) -> None:
        """Ends all processes, those that are starting, too."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def start(self) -> CompilerProcess:
        """Starts a compiler and waits until it is ready. Raises CapacityError if none can be started now,
        InvalidRequestError if xgrammar cannot use the model's tokenizer."""
        process: CompilerProcess | None = None
        try:
            process = CompilerProcess()
            self._add(process)
            description = self._describe_tokenizer()  # while the process imports
            process.wait_ready(description)
        except MinisglError:
            self.end(process)
            raise
        except EOFError as error:
            self.end(process)
            reason = str(error) or "it ended"
            raise CapacityError(f"a grammar compiler did not start: {reason}; try again later") from error
        except OSError as error:
            self.end(process)
            raise CapacityError(f"a grammar compiler cannot be started: {error}; try again later") from error
        return process

    def _add(self, process: HelperProcess) -> None:
        """Registers the process, so that `close` ends it."""
        with self._lock:
            self._running.add(process)
            if self._closed:
                process.kill()

    def end(self, process: HelperProcess | None) -> None:
        if process is not None:
            with self._lock:
                self._running.discard(process)
            process.end()

    def _describe_tokenizer(self) -> str:
        """The tokenizer as xgrammar's JSON, made by a helper process. Raises InvalidRequestError if xgrammar cannot use
        it, EOFError or OSError if the process fails."""
        with self._tokenizer_lock:
            if self._description is None:
                process = TokenizerProcess(self._source)
                self._add(process)
                try:
                    description = process.description()
                finally:
                    self.end(process)
                if description.error:
                    raise InvalidRequestError(f"guided_decoding_guide cannot be compiled: {description.error}")
                self._description = description.info
            return self._description

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, for deserializing and compiling grammars. Raises what `_describe_tokenizer` raises. Loaded
        with the first grammar, not by `warm_up`: importing xgrammar and reading the vocabulary hold the GIL for most of
        a second, which would delay the engine's start or its steps."""
        description = self._describe_tokenizer()
        with self._tokenizer_lock:
            if self._tokenizer is None:
                xgrammar = import_xgrammar(self._stubbed)
                info = xgrammar.TokenizerInfo.deserialize_json(description)
                # Without xgrammar's cache, which would keep everything twice, and texts without a limit.
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._tokenizer = Tokenizer(xgrammar, info, compiler)
                self.forced_text_tokenizer = GreedyTokenizer(info) if self._jump_forward else None
            return self._tokenizer

    def load(self, reply: CompilerReply) -> Any:
        """Deserializes the compiled grammar, or compiles the translated one, which is quick. It is not translated
        again: that is pure Python, which would hold up the engine's step loop."""
        tokenizer = self.load_tokenizer()
        if reply.compiled:
            return tokenizer.xgrammar.CompiledGrammar.deserialize_json(reply.compiled, tokenizer.info)
        assert reply.translated is not None, "what is not sent compiled is sent translated"
        return compile_translated(tokenizer.compiler, reply.translated)
