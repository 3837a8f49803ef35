"""JSON schemas within structural tags: what is refused, as xgrammar would leave it out without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.compiling.translate import translate
from minisgl_backend.request import Grammar

TEXT: dict[str, Any] = {"type": "string"}


def tag(schema: Any, style: str = "qwen_xml", **options: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "style": style, **options}
    form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [form]}}


def plain(structural_tag: dict[str, Any]) -> Any:
    return json.loads(translate(Grammar(kind="structural_tag", text=json.dumps(structural_tag))).text)


def of(schema: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **others}


KEPT = {
    "texts": of(
        {**TEXT, "minLength": 1, "maxLength": 3, "title": "T", "description": "d", "default": "x", "x-order": 1}
    ),
    "pattern": of({**TEXT, "pattern": "^a+$", "format": "password"}),
    "format": of({**TEXT, "format": "date"}),
    "numbers": of({"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 9}),
    "arrays": of({"type": "array", "prefixItems": [TEXT], "items": {"type": "number"}, "minItems": 1, "maxItems": 4}),
    "enum": of({"type": ["string", "integer"], "enum": ["a", 1]}),
    "anyOf": of({"anyOf": [{"const": 1}, {"type": "null"}], "description": "d"}),
    "recursion": of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "$defs": of({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"properties": {"b": TEXT}, "additionalProperties": TEXT}}}),
    "any": {"type": "object"},
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("style", ["qwen_xml", "minimax_xml", "glm_xml", "deepseek_xml"])
def test_schemas_that_xgrammar_keeps_are_left_to_it(name: str, style: str) -> None:
    assert plain(tag(KEPT[name], style)) == tag(KEPT[name], style)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (of(TEXT, dependentRequired={"a": ["b"]}), "dependentRequired at /"),
        (of({"not": TEXT}), "not at /properties/a"),
        (of({"type": "array", "items": {"oneOf": [TEXT]}}), "oneOf at /properties/a/items"),
        (of(TEXT, allOf=[{"required": ["a"]}]), "allOf at /"),
        (of({**TEXT, "pattern": "a", "maxLength": 3}), "pattern at /properties/a cannot be kept beside maxLength"),
        (of({**TEXT, "format": "date", "minLength": 3}), "format at /properties/a cannot be kept beside minLength"),
        (of({**TEXT, "format": "iri"}), "format at /properties/a"),
        (of({"type": "integer", "multipleOf": 3}), "multipleOf at /properties/a"),
        (of({"minLength": 3}), "minLength at /properties/a cannot be kept without a type"),
        (of({"type": "integer", "enum": ["a", 1]}), "type at /properties/a cannot be kept beside enum"),
        (of({"anyOf": [TEXT], "maxLength": 3}), "maxLength at /properties/a cannot be kept beside anyOf"),
        (of({"$ref": "#/$defs/n", "minimum": 3}, **{"$defs": {"n": {}}}), "minimum at /properties/a"),
        (of({"$ref": "#/x/n"}, x={"n": {"not": TEXT}}), "not at /x/n"),
        (of({"$ref": "#n"}, **{"$defs": {"n": {"$anchor": "n"}}}), "$ref at /properties/a"),
        (of(TEXT, required=["a", "b"]), "required at /"),
        (of(TEXT, additionalProperties=True), "additionalProperties at /"),
        ({"$ref": "#/x", "x": of(TEXT, additionalProperties={})}, "additionalProperties at /x"),
    ],
)
def test_what_xgrammar_would_leave_out_is_refused_by_name(schema: Any, words: str) -> None:
    for refused in (tag(schema), {"type": "qwen_xml_parameter", "json_schema": schema}):
        with pytest.raises(InvalidRequestError, match="guided_decoding_guide: the schema's") as error:
            plain(refused)
        assert words in str(error.value)
        assert "qwen_xml" in str(error.value)  # the style says why: as JSON the keyword may be kept


def test_lengths_are_refused_where_texts_are_excluded() -> None:
    with pytest.raises(InvalidRequestError, match="maxLength at /properties/a"):
        plain(tag(of({**TEXT, "maxLength": 3}), excludes=["<"]))


@pytest.mark.parametrize("option", [{"any_order": True}, {"excludes": ["<"]}])
def test_options_that_json_does_not_keep_are_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(option))):
        plain(tag(of(TEXT), "json", **option))


def test_schemas_of_json_are_grammars() -> None:
    written = plain(tag(of({"not": TEXT}), "json", any_order=False, excludes=[], max_whitespace_cnt=1))
    assert written["format"]["tags"][0]["content"]["type"] == "grammar"
