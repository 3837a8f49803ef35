"""Schemas kept in arguments that are no JSON: Gemma 4's and Python's."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.json_schema import schema_grammar
from minisgl_backend.grammar.json_schema.notation import NOTATIONS
from minisgl_backend.parsers.gemma import Gemma4Parser
from minisgl_backend.parsers.parts import ToolParser
from minisgl_backend.parsers.pythonic import Lfm2Parser

Q = '<|"|>'
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "share": {"type": "number", "minimum": -2, "maximum": 5},
        "list": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "object", "properties": {"a b": {"type": ["null", "boolean"]}}, "required": ["a b"]},
        },
        "odd name": {"enum": ['x"y', 3, None]},
        "mark": {"type": "string", "pattern": '^[a-z<|">]{2,5}$'},
        "long": {"type": "string", "maxLength": 200},
        "free": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    },
    "additionalProperties": {"type": "string", "maxLength": 3},
    "maxProperties": 4,
}
BYTES = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])


def compiled(style: str, schema: Any = SCHEMA) -> Any:
    return xgrammar.GrammarCompiler(BYTES).compile_grammar(schema_grammar(schema, NOTATIONS[style]))


@pytest.mark.parametrize(
    ("style", "good", "wrong"),
    [
        (
            "gemma",
            [
                "{}",
                f'{{city:{Q}a"b<|<\n|c\\{Q}}}',
                f"{{share:-1.5,list:[{{{Q}a b{Q}:null}}]}}",
                f'{{{Q}odd name{Q}:{Q}x"y{Q}}}',
                f"{{mark:{Q}a<|{Q}}}",
                f"{{long:{Q}hello{Q},free:{{x:1}},other:{Q}o{Q}}}",
            ],
            [f"{{city:{Q}a{Q}b{Q}}}", f"{{mark:{Q}{Q}{Q}}}", '{city:"a"}', "{share:7}", "{list:[{}]}", '["a"]', "7"],
        ),
        (
            "python",
            [
                "",
                r'city="a\"b\u00e9\n"',
                'share=-1.5, list=[{"a b": None}, {"a b": True}]',
                '**{"odd name": "x\\"y"}',
                'long="x", free={"x": 1}, other="u"',
            ],
            [r'city="\/"', 'city="a\nb"', 'class="u"', "{}", "share=7", 'city="a",share=1', '"a"', "list=[true]"],
        ),
    ],
)
def test_what_a_notation_accepts(style: str, good: list[str], wrong: list[str]) -> None:
    grammar = compiled(style)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text) and matcher.accept_token(0))

    assert [text for text in good if not accepts(text)] == []
    assert [text for text in wrong if accepts(text)] == []


@pytest.mark.parametrize(
    ("style", "begin", "end", "parser"),
    [
        ("gemma", "<|tool_call>call:f", "<tool_call|>", Gemma4Parser({"f": SCHEMA})),
        ("python", "<|tool_call_start|>[f(", ")]<|tool_call_end|>", Lfm2Parser({"f": SCHEMA})),
    ],
)
def test_what_a_grammar_writes_its_parser_reads(style: str, begin: str, end: str, parser: ToolParser) -> None:
    grammar, chance = compiled(style), random.Random(1)
    texts = [text for text in (written(grammar, chance) for _ in range(60)) if text is not None]
    assert len(texts) > 20
    assert len(set(texts)) > 10
    for text in texts:
        parts = [*parser.feed(begin + text + end), *parser.finish("stop")]
        assert [part.kind for part in parts] == ["call", "arguments"], text
        jsonschema.validate(json.loads(parts[1].text), SCHEMA)


def written(grammar: Any, chance: random.Random, most: int = 400) -> str | None:
    """What any choice among the allowed ASCII characters writes; None where it has not ended by then."""
    matcher, bitmask, found = xgrammar.GrammarMatcher(grammar), np.zeros((1, 8), dtype=np.int32), bytearray()
    for _ in range(most):
        matcher.fill_next_token_bitmask(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:128])
        ends = [one for one in allowed if chr(one) in '"<|>}]\0']
        token = int(chance.choice(ends if ends and chance.random() < 0.5 else list(allowed)))
        matcher.accept_token(token)
        if token == 0:
            return found.decode()
        found.append(token)
    return None


def test_what_no_notation_can_write_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"const": f"b{Q}"}}, "required": ["a"]}
    with pytest.raises(InvalidRequestError, match="no value matches the schema"):
        schema_grammar(schema, NOTATIONS["gemma"])
    with pytest.raises(InvalidRequestError, match="no value matches the schema"):
        schema_grammar({"type": "string"}, NOTATIONS["python"])
    assert "b" in schema_grammar(schema, NOTATIONS["python"])
    schema = {"type": "object", "properties": {Q: {"type": "null"}}, "required": [Q]}
    with pytest.raises(InvalidRequestError, match="no value matches the schema"):
        schema_grammar(schema, NOTATIONS["gemma"])
