"""A grammar compiler's own process: `python -m minisgl_backend.engine.grammar_process`, started by `grammar_compilers`.

Some grammars of a few kilobytes take xgrammar minutes and gigabytes, and nothing can interrupt it: a process can be
ended, and has a bound on its memory. What took it little time is known to be harmless, and the engine core compiles it
once more: xgrammar's JSON of it, megabytes with a large vocabulary, would take longer than that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minisgl_backend.engine.short_strings import unrolled
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.host.spawn import TIED, begin_child
from minisgl_backend.request import Grammar

MAX_NESTING = 64  # levels of a JSON schema; the compiler recurses
CACHE_BYTES = 128 << 20
SENT_FROM_S = 0.4  # what takes longer is sent as JSON, unless that is slower
SECONDS_A_BYTE = 55e-9  # of a compiled grammar: written as JSON and read again
MOST_BYTES = 512 << 20  # of a compiled grammar
NICENESS = 10  # two that take long would take both processors of a small machine from the engine
MORE_BYTES = 3 << 30  # of address space, beyond what the process has once it is ready
READY = b"ready"
_ANY_JSON = '{"type": ["object", "array"]}'


class Answer(msgspec.Struct, frozen=True):
    """What came of a grammar: xgrammar's own JSON of it, or what is wrong with it; neither: it is quick and right."""

    compiled: str = ""
    error: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Says READY, takes the tokenizer, then answers one Grammar after the other until the connection closes."""
    parser = argparse.ArgumentParser(description="Compiles grammars for an engine core, which starts it.")
    parser.add_argument("--fd", type=int, required=True, help="a connection to the engine core")
    parser.add_argument(TIED, action="store_true")
    options = parser.parse_args(arguments)
    begin_child("grammars", "WARNING", tied=options.tied)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # Where memory runs out, a compiler is what can be done without.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    connection = Connection(options.fd)
    import xgrammar

    with contextlib.suppress(EOFError, BrokenPipeError):
        connection.send_bytes(READY)
        info = xgrammar.TokenizerInfo.deserialize_json(connection.recv_bytes().decode())
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        _limit_memory()
        connection.send_bytes(READY)
        while True:
            grammar = msgspec.msgpack.decode(connection.recv_bytes(), type=Grammar)
            connection.send_bytes(msgspec.msgpack.encode(_answer(compiler, info.vocab_size, grammar)))
    return 0


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(compiler: Any, vocab_size: int, grammar: Grammar) -> Answer:
    try:
        started = time.perf_counter()
        compiled = compile_grammar(compiler, grammar)
        _check_first_token(compiled, vocab_size)
        seconds, size = time.perf_counter() - started, compiled.memory_size_bytes
        if size > MOST_BYTES:
            raise MemoryError
        if seconds < max(SENT_FROM_S, size * SECONDS_A_BYTE):
            return Answer()
        compiler.clear_cache()  # parts of it would make others quick here that are not in the engine core
        return Answer(compiled=compiled.serialize_json())
    except InvalidRequestError as refused:
        compiler.clear_cache()
        return Answer(error=str(refused))
    except Exception as failure:
        compiler.clear_cache()
        if isinstance(failure, MemoryError) or "bad_alloc" in str(failure):
            return Answer(error="guided_decoding_guide takes too much memory to compile; allowed: a simpler one")
        return Answer(error=f"guided_decoding_guide cannot be compiled: {_reason(failure)}")


def compile_grammar(compiler: Any, grammar: Grammar) -> Any:
    """By xgrammar's GrammarCompiler. Raises InvalidRequestError, and what xgrammar raises."""
    # Free whitespace would let a model indent until its tokens run out: JSON is written as json.dumps writes it.
    if grammar.kind == "json":
        return compiler.compile_json_schema(_ANY_JSON, any_whitespace=False)
    if grammar.kind == "json_schema":
        _check_schema(grammar.text)
        return _compile_schema(compiler, grammar.text)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    return compiler.compile_grammar(grammar.text)


def _compile_schema(compiler: Any, text: str) -> Any:
    if '"maxLength"' in text:
        import xgrammar

        ebnf = str(xgrammar.Grammar.from_json_schema(text, any_whitespace=False))
        quick = unrolled(ebnf)
        # Only where this version of xgrammar reads what it prints.
        if quick != ebnf and str(xgrammar.Grammar.from_ebnf(ebnf)) == ebnf:
            return compiler.compile_grammar(quick)
    return compiler.compile_json_schema(text, any_whitespace=False)


def _check_first_token(compiled: Any, vocab_size: int) -> None:
    """Raises InvalidRequestError for a grammar that allows no first token."""
    import xgrammar

    bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    restricted = xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits, 0)
    if restricted and not bits.any():
        raise InvalidRequestError("guided_decoding_guide accepts no text that this model could write")


def _reason(failure: Exception) -> str:
    """The compiler's own words, without the place in its sources."""
    first_line = next(iter(str(failure).strip().splitlines()), "")
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", first_line)[:500] or type(failure).__name__


def _check_schema(text: str) -> None:
    """Raises InvalidRequestError for what is no JSON or nested too deeply."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"guided_decoding_guide is no JSON schema: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            f"guided_decoding_guide is {json.dumps(schema)[:40]}; allowed: a JSON schema (an object)"
        )
    level, layer = 0, [schema]
    while layer:
        level += 1
        if level > MAX_NESTING:
            raise InvalidRequestError(
                f"guided_decoding_guide is nested more than {MAX_NESTING} levels; allowed: at most {MAX_NESTING}"
            )
        layer = [
            child
            for node in layer
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]


if __name__ == "__main__":
    sys.exit(main())
