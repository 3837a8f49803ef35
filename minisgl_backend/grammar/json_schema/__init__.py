"""What a JSON schema becomes: a grammar that keeps every keyword, or an error that names the one that cannot be kept.

`document` finds schemas and references, `meaning` says by keyword what a schema asks of the values of each JSON type,
`build` makes rules of it. Sets of schemas that hold together (`allOf`, a `$ref` and its neighbours, the schemas of one
property) are one rule, so recursion ends; alternatives that no value fits vanish; and texts are automata, so a pattern
beside a length is one, too.
"""

from __future__ import annotations

from typing import Any

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.json_schema.build import Builder
from minisgl_backend.grammar.json_schema.document import Document
from minisgl_backend.grammar.json_schema.notation import JSON, Notation
from minisgl_backend.grammar.json_schema.rules import TooManyRulesError


def schema_grammar(schema: Any, notation: Notation = JSON) -> str:
    """EBNF, as xgrammar reads it, of values as the notation has them. `schema`: JSON whose numbers are int or Decimal.
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
