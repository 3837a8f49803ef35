"""What a grammar compiler's process answers, and how a grammar that it has translated is compiled.

Apart from that process's own code: an engine core, which needs no more, does not load what translates JSON schemas.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_backend.request import Grammar


class CompilerReply(msgspec.Struct, frozen=True):
    """What came of a grammar: xgrammar's own JSON of it, or what is wrong with it; or, where it is quick, the grammar
    as it was translated."""

    compiled: str = ""
    error: str = ""
    translated: Grammar | None = None


def compile_translated(compiler: Any, grammar: Grammar) -> Any:
    """By xgrammar's GrammarCompiler, what `translate.translate` gave. Raises what xgrammar raises."""
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(grammar.text)
    return compiler.compile_regex(grammar.text) if grammar.kind == "regex" else compiler.compile_grammar(grammar.text)
