"""Converts JSON schemas to EBNF grammars that enforce every keyword, or raises an error that names an unsupported one.

`document` finds schemas and resolves references, `constraints` gives the constraints of each keyword on the values of
each JSON type, and `build` makes grammar rules of them. Each set of schemas that one value must match (`allOf`, a
`$ref` and its siblings, all schemas of a property) becomes one rule, so recursion terminates. Alternatives that no
value matches are dropped. String constraints become automata, so a pattern and a length are intersected.
"""

from __future__ import annotations

from typing import Any

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.json_schema.build import Builder
from minisgl_backend.grammar.json_schema.document import Document
from minisgl_backend.grammar.json_schema.notation import JSON, Notation
from minisgl_backend.grammar.json_schema.rules import TooManyRulesError


def schema_grammar(schema: Any, notation: Notation = JSON) -> str:
    """The schema as xgrammar's EBNF, for values written in `notation`. `schema`: JSON whose numbers are int or Decimal.
    Raises InvalidRequestError."""
    try:
        found = Builder(Document(schema), notation).grammar()
    except TooManyRulesError:
        raise InvalidRequestError("guided_decoding_guide: the schema is too large; allowed: a smaller one") from None
    except RecursionError:
        raise InvalidRequestError("guided_decoding_guide: the schema is nested too deeply") from None
    if not found:
        raise InvalidRequestError("guided_decoding_guide: no value matches the schema; allowed: one that some do")
    return found
