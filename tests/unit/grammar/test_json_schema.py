"""What single schemas allow and refuse."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("xgrammar")

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.compiling.translate import translate
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.request import Grammar
from tests.unit.grammar.schema_sampler import accepts, ebnf

B: dict[str, Any] = {"type": "boolean"}
AB: dict[str, Any] = {"type": "object", "properties": {"a": B, "b": B}}

# schema, texts that it takes, texts that it does not take
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "anyOf beside properties": (
        {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": true}', '{"b": true}', '{"a": true, "b": false}'],
        ["17", "{}"],
    ),
    "allOf": (
        {"allOf": [{"properties": {"x": B}, "required": ["x"]}, {"properties": {"y": B}, "required": ["y"]}]},
        ['{"x": true, "y": false}'],
        ['{"x": true}', "17"],
    ),
    "required without properties": ({"type": "object", "required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"]),
    "no shape": ({"type": "object", "maxProperties": 2}, ["{}", '{"a": 1, "b": [2]}'], ['{"a": 1, "b": 2, "c": 3}']),
    "array without shape": ({"type": "array", "maxItems": 2}, ["[]", '[1, "a"]'], ["[1, 2, 3]"]),
    "minItems alone": ({"type": "array", "minItems": 1}, ["[1]", "[1, [2]]"], ["[]"]),
    "minProperties": (
        {"type": "object", "minProperties": 2},
        ['{"ab": 1, "c": 2}'],
        ["{}", '{"a": 1}', '{"a": 1, "a": 2}'],
    ),
    "many items": (
        {"type": "array", "items": B, "minItems": 3, "maxItems": 200},
        [json.dumps([True] * 3), json.dumps([True] * 200)],
        ["[]", json.dumps([True] * 2), json.dumps([True] * 201)],
    ),
    "a $ref and its neighbours": (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5},
        ["5", "123"],
        ["4", "-7", "5.5"],
    ),
    "pointers into lists": (
        {
            "properties": {"l": {"anyOf": [B, {"type": "null"}]}, "m": {"$ref": "#/properties/l/anyOf/1"}},
            "required": ["m"],
        },
        ['{"m": null}', '{"l": true, "m": null}'],
        ['{"m": true}'],
    ),
    "encoded pointers": ({"$ref": "#/$defs/a%25~1b", "$defs": {"a%/b": B}}, ["true"], ["1"]),
    "anchors": ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", **B}}}, ["true"], ["1"]),
    "type and enum": ({"type": "integer", "enum": [1, "x", 2.5, 7]}, ["1", "7"], ['"x"', "2.5"]),
    "enum and minimum": ({"enum": [1, 5, 9], "minimum": 4}, ["5", "9"], ["1"]),
    "pattern and length": (
        {"type": "string", "pattern": "^a+b", "minLength": 3, "maxLength": 4},
        ['"aab"', '"abxx"', '"ab\\n\\""'],
        ['"ab"', '"aabbb"', '"bbb"'],
    ),
    "counted characters, then others": (
        {"type": "string", "pattern": "^x[a-z]{55,120}[0-9]{70}$"},
        [f'"x{"a" * count}{"1" * 70}"' for count in (55, 72, 79, 119, 120)],
        [f'"x{"a" * count}{"1" * 70}"' for count in (0, 54, 121)] + [f'"x{"a" * 60}{"1" * more}"' for more in (69, 71)],
    ),
    "two counted ends": (
        {"type": "string", "pattern": "^a{0,60}[xb]{0,60}$"},
        ['""', f'"{"a" * 60}{"b" * 60}"', f'"{"b" * 49}x"', f'"{"a" * 25}"'],
        [f'"{"a" * 61}"', f'"{"b" * 61}"', '"ba"'],
    ),
    "counted without an end": (
        {"type": "string", "pattern": "^[a-z]{60,}$"},
        [f'"{"a" * count}"' for count in (60, 61, 200)],
        [f'"{"a" * count}"' for count in (0, 24, 48, 59)],
    ),
    "lookahead": ({"type": "string", "pattern": "^(?=.*[0-9]).{2,}$"}, ['"a1"', '"11"'], ['"ab"', '"1"']),
    "format and pattern": (
        {"type": "string", "format": "date-time", "pattern": "Z$"},
        ['"2024-02-29T10:00:00Z"'],
        ['"2024-02-29T10:00:00+01:00"', '"2023-02-29T10:00:00Z"'],
    ),
    "escapes": (
        {"type": "string", "maxLength": 3},
        ['"a\\"b"', '"a\\nb"', '"\\u00e9\\u0001x"', '"\\ud83d\\ude00ab"', '"日本語"'],
        ['"a\tb"', '"\x01"', '"abcd"', '"\\ud83d"', '"\\"\\"\\"\\""'],
    ),
    "long texts": (
        {"type": "string", "minLength": 2, "maxLength": 300},
        [json.dumps("x" * 2), json.dumps("\n" * 300), json.dumps("x" * 129)],
        ['"x"', json.dumps("x" * 301)],
    ),
    "any text": ({"type": "string"}, ['"\\"\\\\\\u0000"'], ['"\t"', '"\x00"', '"\n"']),
    "bounds that are no integers": ({"type": "integer", "minimum": 0.5, "maximum": 3.5}, ["1", "3"], ["0", "4"]),
    "large bounds": (
        {"type": "integer", "minimum": 2**63, "maximum": 2**64},
        [str(2**63), str(2**64)],
        [str(2**63 - 1), str(2**64 + 1), "7"],
    ),
    "draft 4's bounds": ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5", "2"], ["1", "1.0"]),
    "decimals": (
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 1},
        ["-0.4", "0", "1", "1.0"],
        ["-0.5", "1.01"],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.25, "maximum": 2}, ["0.75", "2", "-10"], ["0.3", "2.25"]),
    "draft 7's items": (
        {"type": "array", "items": [B, {"type": "null"}], "additionalItems": {"type": "integer"}},
        ["[]", "[true, null]", "[true, null, 7]"],
        ["[null]", "[true, null, true]"],
    ),
    "a property that is false": ({"properties": {"a": B, "b": False}}, ["{}", '{"a": true}'], ['{"b": 1}']),
    "not": ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '"ab"'], ['"a"', '"\\u0061"']),
    "oneOf": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["1.5"], ["1"]),
    "if": (
        {**AB, "if": {"properties": {"a": {"const": True}}, "required": ["a"]}, "then": {"required": ["b"]}},
        ['{"a": false}', '{"a": true, "b": true}', "{}"],
        ['{"a": true}'],
    ),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": true}'], ['{"a": true}']),
    "contains": ({"type": "array", "contains": {"const": 1}}, ["[1]", "[2, 1]"], ["[]", "[2]"]),
    "additional names": (
        {"type": "object", "properties": {"a": B}, "additionalProperties": {"type": "integer"}},
        ['{"a": true, "x": 1}', '{"ab": 1}'],
        ['{"a": 1}', '{"\\u0061": 1}', '{"x": true}'],
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": B}}], "properties": {"b": B}, "unevaluatedProperties": False},
        ['{"a": true, "b": true}'],
        ['{"c": true}'],
    ),
    "recursion": (
        {"type": "object", "properties": {"v": B, "next": {"$ref": "#"}}, "required": ["v"]},
        ['{"v": true}', '{"v": true, "next": {"v": false}}'],
        ['{"next": {"v": false}}'],
    ),
    "objects stay closed": ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
}


@pytest.mark.parametrize("name", CASES)
def test_a_schema_takes_what_it_says(name: str) -> None:
    schema, right, wrong = CASES[name]
    assert [text for text in right if not accepts(schema, text)] == []
    assert [text for text in wrong if accepts(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "uniqueItems at /properties/a"),
        ({"properties": {"a": {"$ref": "https://example.com/x"}}}, "$ref at /properties/a"),
        ({"$ref": "#/nowhere"}, "$ref at /"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"type": "string", "pattern": "(a)\\1"}, "pattern at /"),
        ({"type": "string", "pattern": "(?<=a)b"}, "lookbehind"),
        ({"type": "string", "format": "regex"}, "format at /"),
        ({"type": "number", "multipleOf": 0.123456789}, "multipleOf at /"),
        ({"type": "object", "required": "a"}, "required at /"),
        ({"anyOf": []}, "anyOf at /"),
        ({"type": "text"}, "type at /"),
        ({"minLength": -1}, "minLength at /"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value matches"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value matches"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no value matches"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "no value matches"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match="guided_decoding_guide") as refused:
        ebnf(schema)
    assert words in str(refused.value)


def chain(keyword: str, depth: int = 22) -> dict[str, Any]:
    """Definitions that name the next one twice each: 2**depth paths."""
    defs: dict[str, Any] = {f"a{depth}": {"type": "object", "properties": {"x": B, "y": B}}}
    for level in range(depth):
        below = f"#/$defs/a{level + 1}"
        defs[f"a{level}"] = {keyword: [{"$ref": below, "required": ["x"]}, {"$ref": below, "required": ["y"]}]}
    return defs


@pytest.mark.parametrize(
    "schema",
    [
        {"maxLength": 60_000},
        {"minLength": 999, "maxLength": 2001},
        {"pattern": "^[a-z]{1,500}$"},
        {"pattern": "^.{300}$"},
        {"pattern": "^[^,]+$", "maxLength": 255},
    ],
    ids=json.dumps,
)
def test_counted_characters_are_few_states(schema: dict[str, Any]) -> None:
    """Each of them takes the compiler 20 ms with 150,000 tokens. Of blocks there may be many, which take none."""
    rules = ebnf({"type": "string", **schema}).splitlines()
    assert len([rule for rule in rules if "[" in rule]) < 90


@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/$defs/a0"},
        {"type": "object", "not": {"$ref": "#/$defs/a0"}},
        {"allOf": [{"$ref": "#/$defs/a0"}, {"not": {"not": {"$ref": "#/$defs/a0"}}}]},
    ],
    ids=["ref", "not", "twice"],
)
@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "oneOf"])
def test_what_is_referred_to_twice_is_worked_out_once(keyword: str, root: dict[str, Any]) -> None:
    begun = time.thread_time()
    assert ebnf({**root, "$defs": chain(keyword)})
    assert time.thread_time() - begun < 5


def test_types_of_wide_references_are_found_once() -> None:
    defs: dict[str, Any] = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 40} for n in range(4)}
    schema = {"$ref": "#/$defs/l0", "$defs": {**defs, "l4": {"properties": {"a": B}}}}
    begun = time.thread_time()
    assert accepts(schema, '{"a": true}')
    assert time.thread_time() - begun < 5
    assert not accepts(schema, "17")


# https://platform.openai.com/docs/guides/structured-outputs, supported properties of strict mode.
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "pattern": "^@[a-zA-Z0-9_]+$"},
        **{
            name: {"type": "string", "format": name}
            for name in ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
        },
        "multipleOf": {"type": "number", "multipleOf": 5},
        "maximum": {"type": "number", "maximum": 130, "minimum": -130},
        "exclusive": {"type": "number", "exclusiveMaximum": 130, "exclusiveMinimum": -130},
        "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "anyOf": {"anyOf": [{"$ref": "#/$defs/step"}, {"type": "null"}]},
        "enum": {"type": "string", "enum": ["a", "b"]},
        "const": {"const": "c"},
        "self": {"type": ["object", "null"], "anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"output": {"type": "string"}},
            "required": ["output"],
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", STRICT["properties"])
def test_what_strict_mode_has_is_kept(name: str) -> None:
    assert ebnf({**STRICT, "required": [name]})


def chat(*functions: dict[str, Any], **fields: Any) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": f"f{n}", **one}} for n, one in enumerate(functions)]
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"messages": messages, "tools": tools, "tool_choice": "required", **fields})


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_takes_none(given: dict[str, Any]) -> None:
    schema = chat(given).tool_schema()
    assert accepts(schema, '[{"name": "f0", "parameters": {}}]')
    assert not accepts(schema, '[{"name": "f0", "parameters": {"a": 1}}]')


def test_references_of_functions_start_at_their_own_root() -> None:
    tree = {"type": "object", "properties": {"v": B, "next": {"$ref": "#"}}, "required": ["v"]}
    other = {"type": "object", "properties": {"a": {"$ref": "#/$defs/v"}}, "$defs": {"v": {"type": "null"}}}
    same = {"type": "object", "properties": {"a": {"$ref": "#/$defs/v"}}, "$defs": {"v": B}}
    schema = chat({"parameters": tree}, {"parameters": other}, {"parameters": same}).tool_schema()
    assert accepts(schema, '[{"name": "f0", "parameters": {"v": true, "next": {"v": false}}}]')
    assert not accepts(schema, '[{"name": "f0", "parameters": {"v": true, "next": []}}]')
    assert accepts(schema, '[{"name": "f1", "parameters": {"a": null}}, {"name": "f2", "parameters": {"a": true}}]')


def test_a_format_is_idle_beside_a_forced_call() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    request = chat({}, response_format=form)
    request.check()
    assert json.loads(request.sampling()["guided_decoding"]["json"]) == request.tool_schema()


@pytest.mark.parametrize("text", ['start: "yes" | "no"', '?start: WORD\nWORD: "yes" | "no"', 'root ::= "yes" | "no"'])
def test_lark_and_ebnf_are_told_apart(text: str) -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    grammar = xgrammar.Grammar.from_ebnf(translate(Grammar(kind="ebnf_grammar", text=text)).text)
    assert [_is_grammar_accept_string(grammar, word) for word in ("yes", "no", "maybe")] == [True, True, False]


def test_schemas_within_lark_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="%json"):
        translate(Grammar(kind="ebnf_grammar", text='start: %json {"type": "object"}'))
