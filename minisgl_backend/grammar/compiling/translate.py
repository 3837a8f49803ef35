"""Translates grammars of requests into forms that xgrammar supports fully: EBNF, regular expression, structural tag.

JSON schemas are converted to EBNF here (`json_schema`) rather than by xgrammar's own converter, which silently ignores
keywords that it cannot enforce. Lark grammars are recognised by their rules, and converted by xgrammar.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import msgspec

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.json_schema import schema_grammar
from minisgl_backend.grammar.json_schema.notation import NOTATIONS
from minisgl_backend.grammar.json_schema.xml_styles import check_supported
from minisgl_backend.request import Grammar

MAX_NESTING = 64  # levels of a JSON schema
# JSON has the whitespace of json.dumps, since with free whitespace a model might indent until its tokens run out.
_ANY_JSON = {"type": ["object", "array"]}
_LINE_BREAK = re.compile(r"\\.|[\n\r]", re.DOTALL)  # or any escaped character
_LARK_RULE = re.compile(r"^[ \t]*[?!]?[a-zA-Z_]\w*(?:\.-?\d+)?[ \t]*:(?!:=)", re.MULTILINE)
_LARK_JSON = re.compile(r"^(?:[^\"/\n]|\"(?:\\.|[^\"\\\n])*\")*%json\b", re.MULTILINE)


def translate(grammar: Grammar) -> Grammar:
    """Returns a grammar of kind `ebnf_grammar`, `regex`, or `structural_tag` with its JSON schemas converted to EBNF.

    Raises InvalidRequestError, and what xgrammar raises.
    """
    if grammar.kind == "json":
        return _ebnf(schema_grammar(_ANY_JSON))
    if grammar.kind == "json_schema":
        return _ebnf(schema_grammar(_read(grammar.text)))
    if grammar.kind == "regex":
        return Grammar(kind="regex", text=_LINE_BREAK.sub(_escaped, grammar.text))
    if grammar.kind == "structural_tag":
        _read(grammar.text)
        return Grammar(kind="structural_tag", text=json.dumps(_tags(json.loads(grammar.text))))
    if "::=" not in grammar.text and _LARK_RULE.search(grammar.text):
        return _ebnf(_from_lark(grammar.text))
    return grammar


def _ebnf(text: str) -> Grammar:
    return Grammar(kind="ebnf_grammar", text=text)


def _tags(node: Any) -> Any:
    """A structural tag with its JSON schemas converted to EBNF, so that all their keywords are enforced.

    xgrammar converts schemas of other styles, such as XML arguments; keywords that it does not enforce are refused.
    """
    if isinstance(node, list):
        return [_tags(child) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        schema, style = _read(json.dumps(node.get("json_schema"))), node.get("style", "json")
        if style in NOTATIONS:
            _check_options(node)
            return {"type": "grammar", "grammar": schema_grammar(schema, NOTATIONS[style])}
        check_supported(schema, str(style), excludes=bool(node.get("excludes")))
    if node.get("type") == "qwen_xml_parameter":
        check_supported(_read(json.dumps(node.get("json_schema"))), "qwen_xml")
    return {key: value if key == "json_schema" else _tags(value) for key, value in node.items()}


def _check_options(node: dict[str, Any]) -> None:
    for name, allowed in (("any_order", "false"), ("excludes", "none")):
        if node.get(name):
            raise InvalidRequestError(
                f"guided_decoding_guide: {name} of a structural tag's json_schema is {json.dumps(node[name])[:60]}, "
                f"which cannot be kept there; allowed: {allowed}"
            )


def _from_lark(text: str) -> str:
    import xgrammar

    if _LARK_JSON.search(text):
        raise InvalidRequestError("guided_decoding_guide is a Lark grammar with %json; allowed: send the schema alone")
    return str(xgrammar.Grammar.from_lark(text))


def _escaped(found: re.Match[str]) -> str:
    """A line break as an escape, since xgrammar refuses raw ones in character classes."""
    return {"\n": r"\n", "\r": r"\r"}.get(found[0][-1], found[0])


def _read(text: str) -> Any:
    """Parses a JSON schema. Raises InvalidRequestError if it is invalid JSON, no schema, or nested too deeply."""
    try:
        msgspec.json.decode(text)  # strict: refuses NaN and lone surrogates
        schema = json.loads(text, parse_float=Decimal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"guided_decoding_guide is no JSON schema: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            f"guided_decoding_guide is {json.dumps(schema, default=str)[:40]}; allowed: a JSON schema (an object)"
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
    return schema
