"""The reply of a grammar compiler's process, and the compilation of a grammar that it has translated.

Separate from that process's own code, so that an engine core does not import the translation of JSON schemas.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_backend.request import Grammar


class CompilerReply(msgspec.Struct, frozen=True):
    """The compiled grammar, serialized to JSON by xgrammar; or an error message; or, for a grammar that compiles
    quickly, only its translation."""

    compiled: str = ""
    error: str = ""
    translated: Grammar | None = None


def compile_translated(compiler: Any, grammar: Grammar) -> Any:
    """Compiles a result of `translate.translate` with xgrammar's GrammarCompiler. Raises what xgrammar raises."""
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(grammar.text)
    return compiler.compile_regex(grammar.text) if grammar.kind == "regex" else compiler.compile_grammar(grammar.text)
