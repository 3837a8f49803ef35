"""Parsers of tool calls and thoughts: the same whatever places a text is cut at, and nothing of it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.parsers.qwen_coder import QwenCoderParser
from minisgl_backend.parsers.reasoning import TagReasoningParser
from minisgl_backend.parsers.tool_calls import ArgumentsParser, CallListParser, HermesParser, LlamaParser

ARGUMENTS = {"city": 'Köln "am" {Rhein}\\', "days": [1, {"x": None}], "flag": True}
NAMES = ("weather", "time")


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def llama(*calls: tuple[str, Any]) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def run(parser: Any, pieces: Sequence[str], reason: str = "stop") -> list[tuple[Any, ...]]:
    """All parts, those that continue each other joined."""
    events = [part for piece in pieces for part in parser.feed(piece)]
    events += parser.finish(reason)
    joined: list[tuple[Any, ...]] = []
    for kind, text, number, _ in events:
        if joined and kind != "call" and (joined[-1][0], joined[-1][2]) == (kind, number):
            joined[-1] = (kind, joined[-1][1] + text, number)
        else:
            joined.append((kind, text, number))
    return joined


def calls_of(events: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    names = [text for kind, text, _ in events if kind == "call"]
    return [(n, json.loads(t)) for n, t in zip(names, [t for k, t, _ in events if k == "arguments"], strict=True)]


def content_of(events: Sequence[tuple[Any, ...]]) -> str:
    return "".join(text for kind, text, *_ in events if kind == "content")


SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "flag": {"type": "boolean"},
            "zone": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "time": {"type": "object", "properties": {"hour": {"type": ["integer", "null"]}}},
}


def coder(*calls: tuple[str, dict[str, str]]) -> str:
    """Qwen3-Coder's form, of values as they are written."""
    written = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(written)


PARSERS: dict[str, Callable[[], Any]] = {
    "hermes": lambda: HermesParser(NAMES),
    "llama": lambda: LlamaParser(NAMES),
    "coder": lambda: QwenCoderParser(SCHEMAS),
    "list": CallListParser,
    "arguments": lambda: ArgumentsParser("weather"),
    "reasoning": lambda: TagReasoningParser(inside=False),
    "reasoning inside": lambda: TagReasoningParser(inside=True),
}
TEXTS = (
    hermes(("weather", ARGUMENTS)),
    "Let me look.\n" + hermes(("weather", ARGUMENTS), ("time", {})) + "\n",
    hermes(("weather", {})) + " and then ",
    "a < b, <tool_ b> and <tool_call",
    "<tool_call>no JSON</tool_call> after",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>',
    '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
    '<tool_call>{"name": "time", "arguments": {"a": 1',
    '<tool_call>{"name": "time", "arguments": {}}}</tool_call>' + hermes(("time", {"b": 2})),
    llama(("weather", ARGUMENTS)),
    "<|python_tag|>" + llama(("weather", ARGUMENTS), ("time", {})),
    '{"answer": 42}',
    llama(("no tool of the request", {})) + " ",
    "[" + ", ".join(llama((name, ARGUMENTS)) for name in NAMES) + "]",
    "Let me look.\n"
    + coder(("weather", {"city": 'a "b"\n</c> é\n', "days": "[1, 2]"}), ("time", {"hour": "3"}))
    + "\nend ",
    coder(("time", {})).removeprefix("<tool_call>\n") + " <function=> <function=time",
    "<tool_call>\n<function=time>\n<parameter=hour>\nNaN\n</parameter>\n<odd>\n</tool_call> <tool_call>x<function",
    "<tool_call>\n<function=weather>\n<parameter=city>\nRo\n</para",
    '<tool_call>{"name": "time", "arguments": {"a": 1}</tool_call>\n' + hermes(("weather", {})) + "\nBye",
    '<tool_call>{"name": "time", "arguments": {"a": 1}} </tool Bye',
    "The C++ type std<function=x> is odd. <function=time>",
    "<think>\nfirst this, then that\n</think>\n\nThe answer.\n",
    "first this </thin </think> The <think> answer",
    "<think>never ended ",
    "  <thin air",
    "plain text",
    "",
)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", TEXTS)
def test_cut_at_every_place(parser: str, text: str) -> None:
    whole = run(PARSERS[parser](), [text])
    for place in range(len(text)):
        assert run(PARSERS[parser](), [text[:place], text[place:]]) == whole
    assert run(PARSERS[parser](), list(text)) == whole


_FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<", "\n", " ", '{"name": "time", "arguments": {', "}"),
        *("<function=", "time>", "</function>", "<parameter=", "hour>", "zone>", "city>", "</parameter>", "null"),
        *("{", '"', "\\", '"name"', ":", ",", '"time"', '"arguments"', "[", "]", "; ", "x", "é", "<|python_tag|>", "1"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.lists(_FRAGMENTS, max_size=30), st.data())
def test_cut_anywhere(parser: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(PARSERS[parser](), pieces) == run(PARSERS[parser](), [text])


@pytest.mark.parametrize(("parser", "write"), [("hermes", hermes), ("llama", llama)])
def test_calls_are_found(parser: str, write: Callable[..., str]) -> None:
    calls = [("weather", ARGUMENTS), ("time", {}), ("weather", {"a": []})]
    events = run(PARSERS[parser](), [write(*calls)])
    assert calls_of(events) == calls
    assert [number for kind, _, number in events if kind == "call"] == [0, 1, 2]
    assert content_of(events) == ""


def test_calls_in_tags() -> None:
    """Values are what the function's schema says; a text is as it was written, without the line breaks around it."""
    given = {"city": 'Köln "am"\n\n Rhein\\', "days": '[1, {"a": null}]', "flag": "True", "zone": "null", "more": "3"}
    events = run(QwenCoderParser(SCHEMAS), [coder(("weather", given), ("time", {"hour": "7"}))])
    weather = {"city": given["city"], "days": [1, {"a": None}], "flag": True, "zone": None, "more": "3"}
    assert calls_of(events) == [("weather", weather), ("time", {"hour": 7})]
    assert content_of(events) == ""
    assert calls_of(run(QwenCoderParser(SCHEMAS), [coder(("time", {"hour": "NaN"}))])) == [("time", {"hour": "NaN"})]
    parser = QwenCoderParser(SCHEMAS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert "".join(part.text for part in parser.feed("Ro")) == '"Ro'
    nothing = "<tool_call> is a tag, and <function= too"
    assert run(QwenCoderParser(SCHEMAS), [nothing]) == [("content", nothing, 0)]


@pytest.mark.parametrize("end", ["\n</tool_call>", "}\n</tool_call>", "}}</tool_call>", "}", ""])
def test_a_brace_or_a_tag_that_is_missing_costs_nothing_behind_it(end: str) -> None:
    written = '<tool_call>\n{"name": "time", "arguments": {"a": 1}' + end + "\n" + hermes(("weather", {})) + "\nBye"
    events = run(HermesParser(NAMES), [written])
    assert calls_of(events) == [("time", {"a": 1}), ("weather", {})]
    assert content_of(events).strip() == "Bye"


def test_a_function_that_nobody_offered_is_prose() -> None:
    prose = "The C++ type std<function=x> is odd. All of this is told."
    assert run(QwenCoderParser(SCHEMAS), [prose]) == [("content", prose, 0)]
    without_tag = "<function=time>\n<parameter=hour>\n7\n</parameter>\n</function>"
    assert calls_of(run(QwenCoderParser(SCHEMAS), [without_tag])) == [("time", {"hour": 7})]


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesParser(NAMES)
    parser.feed('<tool_call>{"name": "time", "arguments": {"zone": "')
    assert [event.text for event in parser.feed("UT")] == ["UT"]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", TEXTS[3]),
        ("hermes", TEXTS[4]),
        ("hermes", f"and \n{TEXTS[4]}"),
        ("hermes", TEXTS[5]),
        ("llama", TEXTS[12]),
        ("llama", TEXTS[13]),
    ],
)
def test_what_is_no_call_is_content(parser: str, text: str) -> None:
    assert run(PARSERS[parser](), [text]) == [("content", text, 0)]


def test_a_list_of_calls_and_one_by_name() -> None:
    assert calls_of(run(CallListParser(), [TEXTS[14]])) == [(name, ARGUMENTS) for name in NAMES]
    text = json.dumps(ARGUMENTS)
    assert run(ArgumentsParser("weather"), [text]) == [("call", "weather", 0), ("arguments", text, 0)]


def test_thoughts() -> None:
    thoughts, answer = ("reasoning", "first this, then that", 0), ("content", "The answer.\n", 0)
    text = next(text for text in TEXTS if text.startswith("<think>\nfirst"))
    assert run(TagReasoningParser(inside=False), [text]) == [thoughts, answer]
    assert run(TagReasoningParser(inside=True), [text]) == [thoughts, answer]
    assert run(TagReasoningParser(inside=True), [text.removeprefix("<think>")]) == [thoughts, answer]
    assert run(TagReasoningParser(inside=False), ["x <think>"]) == [("content", "x <think>", 0)]
    assert run(TagReasoningParser(inside=True), ["cut off"]) == [("reasoning", "cut off", 0)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<parameter=city>\nRome\n</parameter>", {"city": "Rome"}),
        ("<parameter=city>\nRome\n</parameter>\n</func", {"city": "Rome"}),
        ("<parameter=city>\nRome\n</para", {"city": "Rome"}),
        ("<parameter=city>\nRo", {"city": "Ro"}),
        ("<parameter=city>", {"city": ""}),
        ("<parameter=city>\nRome\n</parameter>\n<parameter=days>\n[1, 2]\n", {"city": "Rome", "days": [1, 2]}),
        ("", {}),
    ],
)
def test_a_call_without_its_end(written: str, arguments: dict[str, Any]) -> None:
    """A model that stops has made its call; one that is cut off has not."""
    text = f"<tool_call>\n<function=weather>\n{written}"
    for pieces in ([text], list(text)):
        assert calls_of(run(PARSERS["coder"](), pieces)) == [("weather", arguments)]
    told = "".join(part[1] for part in run(PARSERS["coder"](), [text], "length") if part[0] == "arguments")
    assert not told.endswith("}")


TYPES: dict[str, Any] = {
    "$defs": {
        "Point": {"type": "object"},
        "Kind": {"enum": ["a", "b"]},
        "Self": {"anyOf": [{"$ref": "#/$defs/Self"}, {"type": "integer"}]},
    },
    "properties": {
        "point": {"$ref": "#/$defs/Point"},
        "kind": {"$ref": "#/$defs/Kind"},
        "self": {"$ref": "#/$defs/Self"},
        "away": {"$ref": "https://example.com/x"},
        "all": {"allOf": [{"$ref": "#/$defs/Point"}, {"description": "where"}]},
        "one": {"enum": [1, 2]},
        "const": {"const": True},
        "number": {"type": "number", "allOf": [{"type": "integer"}]},
        "ways": {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "any": {},
        "true": True,
        "odd": 5,
        "odd type": {"type": 5},
        "odd ways": {"anyOf": 5, "enum": {}, "$ref": []},
    },
}


@pytest.mark.parametrize("key", [key for key in TYPES["properties"] if key != "kind"])
def test_types_that_a_schema_says_in_other_words(key: str) -> None:
    parser = QwenCoderParser({"f": TYPES})
    assert calls_of(run(parser, [coder(("f", {key: '{"x": [1]}'}))])) == [("f", {key: {"x": [1]}})]
    parser = QwenCoderParser({"f": TYPES})
    assert calls_of(run(parser, [coder(("f", {key: "neither"}))])) == [("f", {key: "neither"})]


def test_texts_that_a_schema_says_in_other_words() -> None:
    parser = QwenCoderParser({"f": TYPES})
    assert calls_of(run(parser, [coder(("f", {"kind": "1"}))])) == [("f", {"kind": "1"})]


@pytest.mark.parametrize("schema", [{"properties": ["x"]}, {"properties": 5}, {}, {"properties": {"x": "y"}}])
def test_schemas_that_are_none(schema: dict[str, Any]) -> None:
    parser = QwenCoderParser({"f": schema})
    assert calls_of(run(parser, [coder(("f", {"x": "text"}))])) == [("f", {"x": "text"})]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ('["\\ud800 é"]', ["\ud800 é"]),
        ("1e999", "1e999"),
        ("[-1e999]", "[-1e999]"),
        ("1.5", 1.5),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_values_that_have_no_json(value: str, read: Any) -> None:
    events = run(PARSERS["coder"](), [coder(("weather", {"days": value}))])
    assert calls_of(events) == [("weather", {"days": read})]
    "".join(text for _, text, _ in events).encode()


def test_half_characters_in_calls() -> None:
    name, arguments = '"time"', '"{\\"a\\": \\"\\ud800\\"}"'
    events = run(PARSERS["hermes"](), [f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'])
    assert calls_of(events) == [("time", {"a": "\ud800"})]
    "".join(text for _, text, _ in events).encode()


RUN = {"run": {"properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}}
DAMAGED = [
    ("<parameter=cmd>\nls\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>", {"cmd": "ls", "n": 5}),
    ("<parameter=n>\n5\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>", {"cmd": "ls", "n": 5}),
    ("<parameter=cmd>\nls\n</function>\n</tool_call>", {"cmd": "ls"}),
    ("<parameter=cmd>\nls\n</function>", {"cmd": "ls"}),
    ("<parameter=cmd>\nls\n</tool_call>\n", {"cmd": "ls"}),
    ("<parameter=n>\n5\n</function>\n</tool_call>", {"n": 5}),
    ("<parameter=n>\n5</parameter>\n<parameter=\necho $X\n</parameter>\n</function>\n</tool_call>", {"n": 5}),
    ("<parameter=n: 5\n</parameter>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>", {"cmd": "ls"}),
    ("<parameter=o>\n{'k': 'v', 'l': [True, None]}\n</parameter>\n</function>", {"o": {"k": "v", "l": [True, None]}}),
    ("<parameter=o>\n['a', 'b']\n</parameter>\n</function>", {"o": ["a", "b"]}),
    ("<parameter=o>\n{'k': __import__('os')}\n</parameter>\n</function>", {"o": "{'k': __import__('os')}"}),
    # Tags in a text are text: those of no parameter, of one that was given, and within a line.
    ("<parameter=cmd>\na\n<parameter=x>\nb </function> c\n</parameter>", {"cmd": "a\n<parameter=x>\nb </function> c"}),
    ("<parameter=cmd>\na\n<parameter=cmd>\nb\n</parameter>", {"cmd": "a\n<parameter=cmd>\nb"}),
    ("<parameter=cmd>\necho '\n</function>\n'\n</parameter>\n</function>", {"cmd": "echo '\n</function>\n'"}),
]


@pytest.mark.parametrize(("written", "arguments"), DAMAGED)
def test_damaged_calls_in_tags(written: str, arguments: dict[str, Any]) -> None:
    text = "<tool_call>\n<function=run>\n" + written
    for pieces in ([text], list(text)):
        assert calls_of(run(QwenCoderParser(RUN), pieces)) == [("run", arguments)]
    if text.endswith("</tool_call>"):
        behind = text + "\n" + coder(("run", {"n": "1"}))
        for pieces in ([behind], list(behind)):
            assert calls_of(run(QwenCoderParser(RUN), pieces)) == [("run", arguments), ("run", {"n": 1})]


def test_two_calls_within_one_pair_of_tags() -> None:
    one, two = (f'{{"name": "time", "arguments": {{"a": {number}}}}}' for number in (1, 2))
    for text in (f"<tool_call>{one}\n{two}</tool_call>", f"<tool_call>\n{one},{two}\n</tool_call>\n"):
        for pieces in ([text], list(text)):
            events = run(HermesParser(NAMES), pieces)
            assert calls_of(events) == [("time", {"a": 1}), ("time", {"a": 2})]
            assert content_of(events) == ""


@pytest.mark.parametrize("arguments", ["[1, 2]", "5", '"[1]"', '"text"', "true"])
def test_arguments_that_no_function_takes_are_content(arguments: str) -> None:
    text = f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>'
    assert run(HermesParser(NAMES), [text]) == [("content", text, 0)]
    for nothing in ("null", '""', '"{}"'):
        text = f'<tool_call>{{"name": "time", "arguments": {nothing}}}</tool_call>'
        assert calls_of(run(HermesParser(NAMES), [text])) == [("time", {})]
