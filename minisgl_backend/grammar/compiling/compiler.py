"""The process of a grammar compiler: `python -m minisgl_backend.grammar.compiling.compiler`, started by an engine core.

Some grammars of a few kilobytes take xgrammar minutes and gigabytes, and a compilation cannot be interrupted. A process
can be killed, and its memory limited. A grammar that compiled quickly here is known to be harmless, so the engine core
compiles it again: serialized to JSON it has megabytes with a large vocabulary, which takes longer to send and parse.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import sys
import time
from typing import Any

import msgspec
import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.compiling.helper import begin_helper
from minisgl_backend.grammar.compiling.light_import import UNUSED_PACKAGES, import_xgrammar
from minisgl_backend.grammar.compiling.reply import CompilerReply, compile_translated
from minisgl_backend.grammar.compiling.translate import translate
from minisgl_backend.grammar.time_budget import CALL_LIMIT_S, TOO_SLOW
from minisgl_backend.request import Grammar

SERIALIZED_FROM_S = 0.02  # CPU time of all threads: a longer compilation is sent as JSON, unless that is slower
SERIALIZE_S_PER_BYTE = 55e-9  # of a compiled grammar: to serialize it to JSON and parse that
MAX_COMPILED_BYTES = 512 << 20  # of a compiled grammar
MAX_ADDED_BYTES = 3 << 30  # of address space, in addition to what the process has when it is ready
MAX_THREADS = 4  # for one grammar
DRY_RUN_TOKENS = 24  # generated with each grammar, none of which may take longer than CALL_LIMIT_S
READY = b"ready"


def main(arguments: list[str] | None = None) -> int:
    """Sends READY, receives the tokenizer, then replies to one Grammar after the other until the connection closes."""
    parser = argparse.ArgumentParser(description="Compiles grammars for an engine core, which starts it.")
    helper = begin_helper(parser, arguments)
    connection = helper.connection
    with helper.or_retry_with_all_imports():
        xgrammar = import_xgrammar(helper.stubbed(UNUSED_PACKAGES))
        _check_library(xgrammar)
    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send_bytes(READY)
        info = xgrammar.TokenizerInfo.deserialize_json(connection.recv_bytes().decode())
        lengths = text_lengths(info)
        # xgrammar's cache keeps texts without a limit, and would hide how long a grammar takes in the engine core.
        compiler = xgrammar.GrammarCompiler(info, max_threads=_num_threads(), cache_enabled=False)
        _limit_memory()
        connection.send_bytes(READY)
        while True:
            grammar = msgspec.msgpack.decode(connection.recv_bytes(), type=Grammar)
            connection.send_bytes(msgspec.msgpack.encode(_compile(compiler, lengths, grammar)))
    return 0


def _check_library(xgrammar: Any) -> None:
    """Checks that everything that a compilation imports is there. Raises whatever is wrong."""
    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    dry_run(compile_grammar(compiler, Grammar(kind="json_schema", text='{"enum": ["a"]}')), text_lengths(info))


def _num_threads() -> int:
    """Threads that compile one grammar. Several compilers may run in parallel, next to the engine core."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 4))


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + MAX_ADDED_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _compile(compiler: Any, lengths: Int32Array, grammar: Grammar) -> CompilerReply:
    try:
        translated = translate(grammar)
        started = time.process_time()
        compiled = compile_translated(compiler, translated)
        seconds, size = time.process_time() - started, compiled.memory_size_bytes
        dry_run(compiled, lengths)
        if size > MAX_COMPILED_BYTES:
            raise MemoryError
        if seconds < max(SERIALIZED_FROM_S, size * SERIALIZE_S_PER_BYTE):
            return CompilerReply(translated=translated)
        return CompilerReply(compiled=compiled.serialize_json())
    except InvalidRequestError as refused:
        return CompilerReply(error=str(refused))
    except Exception as failure:
        if isinstance(failure, MemoryError) or "bad_alloc" in str(failure):
            return CompilerReply(error="guided_decoding_guide takes too much memory to compile; allowed: a simpler one")
        return CompilerReply(error=f"guided_decoding_guide cannot be compiled: {_reason(failure)}")


def compile_grammar(compiler: Any, grammar: Grammar) -> Any:
    """Compiles with xgrammar's GrammarCompiler. Raises InvalidRequestError, and what xgrammar raises."""
    return compile_translated(compiler, translate(grammar))


def dry_run(compiled: Any, lengths: Int32Array) -> None:
    """Generates the beginning of an output with a matcher, always choosing the longest allowed token, since with an
    ambiguous grammar each character multiplies the work. Raises InvalidRequestError for a grammar that allows no first
    token, and for one whose masks or tokens take so long that they would hold up the step of all sequences.

    lengths: bytes of each token's text, int32 [vocab_size].
    """
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = np.zeros((1, -(-len(lengths) // 32)), dtype=np.int32)
    for number in range(DRY_RUN_TOKENS):
        started = time.thread_time()
        if matcher.fill_next_token_bitmask(bitmask, 0):
            allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: len(lengths)]
            if not allowed.any():
                if number == 0:
                    raise InvalidRequestError("guided_decoding_guide accepts no text that this model could write")
                return
            token = int(np.argmax(np.where(allowed, lengths, -1)))
        else:
            token = int(np.argmax(lengths))
        goes_on = matcher.accept_token(token) and not matcher.is_terminated()
        if time.thread_time() - started > CALL_LIMIT_S:
            raise InvalidRequestError(TOO_SLOW)
        if not goes_on:
            return


def text_lengths(info: Any) -> Int32Array:
    """Bytes of each token's text, int32 [vocab_size]; 0 for stop and special tokens, which grammars do not match."""
    lengths = np.zeros(info.vocab_size, dtype=np.int32)
    texts = info.decoded_vocab
    lengths[: len(texts)] = [len(text) for text in texts]
    lengths[[*info.stop_token_ids, *info.special_token_ids]] = 0
    return lengths


def _reason(failure: Exception) -> str:
    """The compiler's message, without the location in its source code."""
    first_line = next(iter(str(failure).strip().splitlines()), "")
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", first_line)[:500] or type(failure).__name__


if __name__ == "__main__":
    sys.exit(main())
