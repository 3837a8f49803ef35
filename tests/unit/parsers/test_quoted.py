"""What stands inside a value is text: calls that quote calls, whole, cut and ended anywhere, in all formats."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.parsers.parts import STOP, STOP_TEXT
from minisgl_backend.parsers.table import CALLS as FORMATS
from tests.unit.parsers.formats import WRITERS, Call
from tests.unit.parsers.quoted import INNER, SCHEMAS, STOP_WORD, outer_calls, quoted, tags, told, unharmed
from tests.unit.parsers.test_parsers import content_of, run

# Every format inside itself in each run, every one inside every other with --full. A row of WRITERS is in it.
PAIRS = [
    pytest.param(outer, inner, marks=[] if outer == inner else [pytest.mark.full])
    for outer in sorted(WRITERS)
    for inner in sorted(WRITERS)
]


def new_parser(written: str) -> Any:
    return FORMATS[WRITERS[written][0]].new_calls(SCHEMAS)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_call_in_a_call_is_text(outer: str, inner: str, pytestconfig: pytest.Config) -> None:
    write = WRITERS[outer][1]
    every = 1 if pytestconfig.getoption("--full", default=False) else 5
    for what, text in quoted(outer, inner):
        for number, calls in enumerate(outer_calls(text)):
            answer = write(calls)
            whole = run(new_parser(outer), [answer])
            assert unharmed(whole, calls), (what, whole)
            if not told(whole)[0] and not told(whole)[1]:
                assert content_of(whole).split() == answer.split(), what
            assert run(new_parser(outer), list(answer)) == whole, what
            for place in range(number, len(answer), 1 if number == 0 else 23):
                if place % every == number:
                    assert run(new_parser(outer), [answer[:place], answer[place:]]) == whole, (what, answer[:place])
                cut = run(new_parser(outer), [answer[:place]], "length")
                assert unharmed(cut, calls), (what, answer[:place], cut)
            if what == "a stop text":
                stopped = run(new_parser(outer), [answer[: answer.index(STOP_WORD)]], STOP_TEXT)
                assert unharmed(stopped, calls), stopped
                assert len(told(stopped)[0]) <= (number == 3), stopped


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_a_call_in_a_call_is_read_where_it_can_be(written: str) -> None:
    """Only Gemma 4's texts have no end of their own."""
    calls = [("write", {"path": "x", "content": f"See:\n{WRITERS[written][1]([INNER])}\nAll."}), ("time", {})]
    found, _ = told(run(new_parser(written), [WRITERS[written][1](calls)]))
    assert found == (calls if written != "gemma4" else [])


@pytest.mark.parametrize("written", ["deepseek_v32", "glm45", "glm47", "minimax_m2", "qwen3_coder", "gemma4"])
def test_a_text_that_is_letter_by_letter_that_of_two_calls_is_two(written: str) -> None:
    before, behind = tags(written)
    write = WRITERS[written][1]
    two = [("run", {"cmd": "ls"}), ("run", {"cmd": "cat"})]
    quotes = f"ls{behind}{before}cat"
    assert write([("run", {"cmd": quotes})]) == f"{before}ls{behind}{before}cat{behind}"
    for reason in (STOP, STOP_TEXT):
        assert told(run(new_parser(written), [f"{before}ls{behind}{before}cat{behind}"], reason)) == (two, [])
    # One more end, and one of them is quoted; which cannot be told.
    answer = f"{before}{quotes}{behind}{behind}"
    found, broken = told(run(new_parser(written), [answer]))
    assert found == []
    assert bool(broken) == (written == "qwen3_coder"), "texts of this format are told as they are written"


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_a_damaged_call_hides_no_other(written: str) -> None:
    """The rest of the answer is content, since what follows may be what a damaged value quotes."""
    name, write = WRITERS[written]
    whole = write([("write", {"path": "x", "content": "@@"})])
    for wrong in ('"', "'", '",', "'}", '"})', "\x00", '"}'):
        answer = whole.replace("@@", f"a {wrong} b\n{write([INNER])}\n c")
        events = run(FORMATS[name].new_calls(SCHEMAS), [answer])
        assert run(FORMATS[name].new_calls(SCHEMAS), list(answer)) == events
        found, _ = told(events)
        if wrong not in ('",', "'}", '"})', '"}'):  # these may end a call: what follows is another one
            assert INNER not in found, (wrong, events)


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_calls_of_other_functions_are_content_and_hide_what_they_quote(written: str) -> None:
    name, write = WRITERS[written]
    others: list[dict[str, Any]] = [{}, {"a": "b"}, {"a": write([INNER])}]
    for arguments in others:
        answer = write([("nobody", arguments)])
        events = run(new_parser(written), [answer])
        assert told(events) == ([], [])
        assert content_of(events).strip()
        assert run(new_parser(written), list(answer)) == events
    if name not in ("llama3_json", "pythonic", "lfm2"):  # one list, or an answer that is text from then on
        events = run(new_parser(written), [write([("nobody", {"a": "b"}), INNER])])
        assert told(events) == ([INNER], [])


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_calls_without_arguments(written: str) -> None:
    name, write = WRITERS[written]
    bare = {
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time{}<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "kimi_k2": "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "mistral": "[TOOL_CALLS]time[ARGS]{}",
        "harmony": "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>",
        "hermes": '<tool_call>{"name": "time"{}}</tool_call>',
        "llama3_json": '{"name": "time"{}}',
        "granite": '<|tool_call|>[{"name": "time"{}}]',
        "minimax": '<tool_calls>[{"name": "time"{}}]</tool_calls>',
    }
    answers = [write([("time", {})])]
    if name in bare:
        values = ("", "null", "{ }") if bare[name][-2] != "}" and '"name"' not in bare[name] else ("",)
        answers += [bare[name].replace("{}", value, 1) for value in values]
    for answer in answers:
        for pieces in ([answer], list(answer)):
            events = run(new_parser(written), pieces)
            assert (told(events), content_of(events)) == (([("time", {})], []), ""), answer


NAMES = [*"files/read a:b v1.files.read a-b naïve 名前 x😀y f(x) x>y <b> a\"b it's a\\b {x} x{y [x] a=b $ ﬁle".split()]
NAMES += [
    "my tool",
    "read, write",
    " lead",
    "trail ",
    "é" * 128,
    "class",
    "null",
    "[ARGS]",
    "{name}",
    "a",
    "a:0",
    "functions.a",
]
NAMES += ["files", "files/read/all"]


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_functions_are_found_by_any_name(written: str) -> None:
    name, write = WRITERS[written]
    functions = dict.fromkeys(NAMES, SCHEMAS["run"])
    for one in NAMES:
        cases: list[list[Call]] = [[(one, {})], [("files", {"cmd": "a"}), (one, {"cmd": "b"})]]
        for calls in cases:
            events = run(FORMATS[name].new_calls(functions), [write(calls)])
            assert (told(events), content_of(events).strip()) == ((calls, []), "")
            assert run(FORMATS[name].new_calls(functions), list(write(calls))) == events
    for one in ("files/write", "my", "名", "a b c"):  # begin like some, or some like them
        assert told(run(FORMATS[name].new_calls(functions), [write([(one, {"cmd": "a"})])]))[0] == []


@pytest.mark.parametrize("written", ["deepseek_v32", "glm45", "glm47", "minimax_m2", "qwen3_coder"])
def test_arguments_that_a_function_cannot_have_tell_what_is_quoted(written: str) -> None:
    name, write = WRITERS[written]
    functions = {one: {**schema, "additionalProperties": False} for one, schema in SCHEMAS.items()}
    before, behind = tags(written)
    for text in (behind + before, behind + before + "ls"):
        answer = write([("write", {"content": text, "path": "x"})])
        for pieces in ([answer], list(answer)):
            assert told(run(FORMATS[name].new_calls(functions), pieces))[0] == [], text
