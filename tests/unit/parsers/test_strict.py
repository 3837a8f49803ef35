"""Calls by a grammar in each format that has one: what it accepts, and what a model writes under it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import xgrammar

from minisgl_backend import LLM, Grammar, SamplingParams
from minisgl_backend.grammar.compiling.compiler import compile_grammar
from minisgl_backend.parsers.strict import structural_tag
from minisgl_backend.parsers.table import CALLS as FORMATS
from tests.unit.parsers.formats import WRITERS, Call
from tests.unit.parsers.test_parsers import calls_of, run

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}, "where": POINT},
    "required": ["city", "warm", "where"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, tuple[dict[str, Any], bool]] = {"weather": (SCHEMA, True), "other": ({"type": "object"}, False)}
SCHEMAS = {name: schema for name, (schema, _) in FUNCTIONS.items()}
GOOD: list[Call] = [("weather", {"city": "Rome", "warm": True, "where": {"x": 7}})]
WRONG: list[list[Call]] = [
    [("weather", {"city": "Paris", "warm": True, "where": {"x": 7}})],
    [("weather", {"city": "Rome", "warm": True, "where": {"x": "y"}})],
    [("weather", {"city": "Rome"})],
    [("nobody", {})],
]
# Ways of writing calls that no grammar of their format makes.
OTHERWISE = {"harmony of the template", "mistral, ids", "pythonic, single quotes"}
MARKS = {"mistral, names": "[ARGS]", "apriel": "<tool_calls>["}  # what tells them from others of their row
STRICT = sorted(
    name
    for name, (row, _) in WRITERS.items()
    if FORMATS[row].strict_form("", [MARKS.get(name, "")]) is not None and name not in OTHERWISE
)

# What is accepted is tried of all; a model's answers of these, and with --full of all.
WRITTEN_IN_EVERY_RUN = {"harmony", "hermes", "qwen3_coder"}


def grammar_of(written: str, *, forced: bool = False) -> Grammar:
    """`forced`: exactly one call, of the weather."""
    form = FORMATS[WRITERS[written][0]].strict_form("", [MARKS.get(written, "")])
    assert form is not None
    functions = {"weather": FUNCTIONS["weather"]} if forced else FUNCTIONS
    tag = structural_tag(form, functions, forced=forced, parallel=not forced)
    return Grammar(kind="structural_tag", text=json.dumps(tag))


@pytest.mark.parametrize("written", STRICT)
def test_what_a_grammar_of_calls_accepts(written: str) -> None:
    bytes_alone = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
    compiled = compile_grammar(xgrammar.GrammarCompiler(bytes_alone), grammar_of(written))

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(text) and matcher.accept_token(0)

    write = WRITERS[written][1]
    if written != "glm47":  # a name and its first key stand in one line there
        assert accepts(write(GOOD))
        assert accepts(f"First this.\n{write(GOOD)}\n")
        assert accepts(write(GOOD * 2)) or written == "llama3_json"
    assert accepts("No call at all. ")
    for wrong in WRONG[: 3 if written == "pythonic" else 4]:  # what names no function is text there
        assert not accepts(write(wrong)), wrong


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=256) as found:
        yield found


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(name, marks=[] if name in WRITTEN_IN_EVERY_RUN else [pytest.mark.full])
        for name in sorted(set(STRICT) - {"glm47"})
    ],
)
def test_calls_that_a_grammar_forces_keep_their_schema(llm: LLM, written: str) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=400, grammar=grammar_of(written, forced=True))
    row = FORMATS[WRITERS[written][0]]
    (output,) = llm.chat([[{"role": "user", "content": "How is the weather?"}]], params)
    whole = [one.text for one in output.completions if one.finish_reason == "stop"]
    for text in whole:
        ((name, arguments),) = calls_of(run(row.new_calls(SCHEMAS), list(text)))
        assert (name, set(arguments)) == ("weather", {"city", "warm", "where"})
        assert arguments["city"] in ("Rome", "Oslo")
        assert isinstance(arguments["warm"], bool)
        assert isinstance(arguments["where"]["x"], int)
    assert whole, [one.text for one in output.completions]
