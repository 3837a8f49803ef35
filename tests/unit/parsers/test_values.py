"""Values that models write in other ways than their format has them: the arguments that were meant, as valid JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl_backend.parsers.json_reader import JsonReader
from minisgl_backend.parsers.table import CALLS as FORMATS
from tests.unit.parsers.formats import WRITERS
from tests.unit.parsers.quoted import told
from tests.unit.parsers.test_parsers import content_of, run

FUNCTIONS: dict[str, Any] = {"run": {"properties": {"cmd": {}, "n": {"type": "number"}}}}
# (as it was written, the arguments that were meant; None: it is no JSON)
WRITTEN: list[tuple[str, Any]] = [
    ('{"cmd": "a\nb\tc"}', {"cmd": "a\nb\tc"}),
    (r'{"cmd": "grep \d+ \'x\' \u00e9 \ud83d\ude00 \u12"}', {"cmd": "grep \\d+ 'x' é 😀 \\u12"}),
    ('{"cmd": "a",}', {"cmd": "a"}),
    ('{"cmd": [1, 2 , ], "n": 1}', {"cmd": [1, 2], "n": 1}),
    ('{"cmd": True, "n": None}', {"cmd": True, "n": None}),
    ('{"n": NaN, "cmd": [-Infinity, 1e400, -1.5e-3, 0]}', {"n": "NaN", "cmd": ["-Infinity", "1e400", -0.0015, 0]}),
    ('{ "cmd" : { } }', {"cmd": {}}),
    ('{"cmd": "\\\\"}', {"cmd": "\\"}),
    ('{"cmd": ls}', None),
    ('{"cmd": 01}', None),
    ("{\"cmd\": 'ls'}", None),
    ('{"cmd" "ls"}', None),
    ('{"cmd": "ls"]', None),
    ('{cmd: "ls"}', None),
    ("{,}", None),
    ('{"cmd": ' + "[" * 500, None),
]


@pytest.mark.parametrize(("written", "meant"), WRITTEN)
def test_json_that_models_write(written: str, meant: Any) -> None:
    for pieces in ([written], list(written)):
        reader, found = JsonReader(), ""
        for piece in pieces:
            end, text = reader.feed(piece)
            found += text
            assert end == len(piece) or reader.state != "open"
        assert reader.state == ("broken" if meant is None else "done")
        assert meant is None or json.loads(found) == meant


@pytest.mark.parametrize(
    "written", ["harmony", "deepseek_v3", "kimi_k2", "mistral, names", "granite", "apriel", "hermes"]
)
def test_arguments_are_json_or_content(written: str) -> None:
    name, write = WRITERS[written]
    whole = write([("run", {})])
    for arguments, meant in WRITTEN:
        answer = arguments.join(whole.rsplit("{}", 1))
        for pieces in ([answer], list(answer)):
            calls, broken = told(run(FORMATS[name].new_calls(FUNCTIONS), pieces))
            assert calls == ([] if meant is None else [("run", meant)]), answer
            assert bool(broken) == (meant is None)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ('"ls"', "ls"),
        ("'a'", "a"),
        (r"'it\'s \"so\"\n'", 'it\'s "so"\n'),
        ("'say \"a\"'", 'say "a"'),
        ('"<tool_call|>"', "<tool_call|>"),
        ("'<|tool_call>call:run{}<tool_call|>'", "<|tool_call>call:run{}<tool_call|>"),
        ('<|"|>a "b" \'c\'<|"|>', "a \"b\" 'c'"),
        ("1e400", "1e400"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("True", True),
        ("null", None),
        ("-1.5", -1.5),
        ('["a",\'b\',<|"|>c<|"|>]', ["a", "b", "c"]),
        ('{"k":1,\'l\':2,m:3,<|"|>n<|"|>:4}', {"k": 1, "l": 2, "m": 3, "n": 4}),
    ],
)
def test_gemma_4_in_other_quotes(value: str, meant: Any) -> None:
    answer = f"<|tool_call>call:run{{cmd:{value}}}<tool_call|>"
    for pieces in ([answer], list(answer)):
        assert told(run(FORMATS["gemma4"].new_calls(FUNCTIONS), pieces)) == ([("run", {"cmd": meant})], [])


@pytest.mark.parametrize("value", ["ls", "'it's'", '"a', '<|"|>a', "01", "1e", "[1", "{a}", "a:1"])
def test_gemma_4_that_is_damaged_is_content(value: str) -> None:
    answer = f"<|tool_call>call:run{{cmd:{value}}}<tool_call|>"
    for pieces in ([answer], list(answer)):
        events = run(FORMATS["gemma4"].new_calls(FUNCTIONS), pieces)
        assert (told(events), content_of(events)) == (([], []), answer)
