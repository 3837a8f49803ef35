"""Strings of bounded length in JSON schemas: quick masks, and the same language to the token."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from minisgl_backend.grammar.compiler import compile_grammar
from minisgl_backend.grammar.short_strings import MAX_LENGTH, unrolled
from minisgl_backend.request import Grammar

xgrammar = pytest.importorskip("xgrammar")

WORDS = [
    *map(chr, range(32, 127)),
    "\n",
    "\t",
    "é",
    "日本",
    "abc",
    "abcd ",
    'ab"',
    '",',
    '", "',
    '"}',
    "xxxxxxxx",
    "<end>",
]
WORDS += [f" w{number}" for number in range(500)]
END = WORDS.index("<end>")


@pytest.fixture(scope="module")
def compiler() -> Any:
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(WORDS, vocab_size=len(WORDS), stop_token_ids=[END]), max_threads=1
    )


def string(least: int | None = None, most: int | None = None) -> dict[str, Any]:
    bounds = {"minLength": least, "maxLength": most}
    return {"type": "string", **{name: bound for name, bound in bounds.items() if bound is not None}}


SCHEMAS: dict[str, Any] = {
    "alone": string(0, 3),
    "empty": string(0, 0),
    "exact": string(2, 2),
    "both": string(3, 9),
    "long": string(0, MAX_LENGTH + 1),
    "several": {
        "type": "object",
        "properties": {"a": string(0, 7), "b": string(2, 5), "c": string(1), "d": string(), "e": string(0, 7)},
        "required": ["a", "e"],
    },
    "array": {"type": "array", "items": string(1, 4), "minItems": 2},
    "choice": {"anyOf": [string(0, 4), {"type": "integer"}, {"enum": ["short_string_0_4", 'a"b\\c\n', "é"]}]},
    "pattern": {"type": "string", "pattern": "^a+ b$", "maxLength": 9},
    "recursive": {
        "$defs": {
            "short_string": {"type": "object", "properties": {"v": string(0, 4), "k": {"$ref": "#/$defs/list"}}},
            "list": {"type": "array", "items": {"$ref": "#/$defs/short_string"}},
        },
        "$ref": "#/$defs/short_string",
    },
    "names": {"type": "object", "properties": {'日 "q\\ \n{0, 3}': string(0, 3)}, "additionalProperties": string(0, 2)},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_masks_are_those_of_the_grammar_before(compiler: Any, name: str) -> None:
    text = json.dumps(SCHEMAS[name])
    before = compiler.compile_json_schema(text, any_whitespace=False)
    after = compile_grammar(compiler, Grammar(kind="json_schema", text=text))
    for seed in range(20):
        chance = random.Random(seed)
        matchers = [xgrammar.GrammarMatcher(before), xgrammar.GrammarMatcher(after)]
        for _ in range(60):
            masks = np.zeros((2, -(-len(WORDS) // 32)), dtype=np.int32)
            for line, matcher in enumerate(matchers):
                matcher.fill_next_token_bitmask(masks, line)
            # Bits behind the vocabulary are nobody's.
            expected, found = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : len(WORDS)]
            assert (expected == found).all()
            allowed = expected.nonzero()[0].tolist()
            token = chance.choice(allowed)
            assert [matcher.accept_token(token) for matcher in matchers] == [True, True]
            if token == END:
                break


def test_rules_that_end_before_the_quote_are_gone(compiler: Any) -> None:
    ebnf = str(xgrammar.Grammar.from_json_schema(json.dumps(SCHEMAS["several"]), any_whitespace=False))
    quick = unrolled(ebnf)
    assert quick != ebnf
    # One chain of rules for the lengths 7 and 5, another for the least length of 2.
    assert {line.split(" ::= ")[0] for line in quick.splitlines() if line.startswith("short_string_")} == {
        *(f"short_string_0_{most}" for most in range(8)),
        "short_string_2_5",
        "short_string_1_4",
    }


@pytest.mark.parametrize("name", ["long", "pattern"])
def test_other_grammars_stay_as_they_are(name: str) -> None:
    ebnf = str(xgrammar.Grammar.from_json_schema(json.dumps(SCHEMAS[name]), any_whitespace=False))
    assert unrolled(ebnf).split() == ebnf.split()
