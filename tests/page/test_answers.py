"""What the page makes of answers, whatever a model writes and however a stream ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.page.browser import CUT, Browser, PageServer

LENGTH = 100_000
LOOPS = {
    "quotes": "> ",
    "quoted lines": "> a\n> > b\n",
    "numbers": "1. ",
    "items": "- a\n",
    "items in items": "- a\n  - b\n    - c\n",
    "emphasis": "*a _",
    "bold": "**a ",
    "table": "| 1 | 2 |\n",
    "brackets": "[a](",
    "code marks": "`a``b",
    "dollars": "$a $$ ",
    "brackets of mathematics": "\\[a \\(",
    "fences": "```\na\n",
    "code": "x = 1\n",
    "one word": "word ",
    "lines": "line\n",
    "paragraphs": "a paragraph\n\n",
    "html": "<div><b>",
    "headings": "# a\n",
    "rules": "---\n",
}
STARTS = {"table": "| a | b |\n| - | - |\n", "code": "```python\n"}
WATCH = """
window.longest = 0;
new PerformanceObserver(list => {
  for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
}).observe({type: "longtask"});
"""
MIXED = """Text with *emphasis*.

- one
- two

```python
def f():
    return "```"
```

| a | b |
| --- | --- |
| 1 | 2 |

> quoted

1. first
   - nested

Done, $x^2$ and `code`.
"""


def text_of(loop: str) -> str:
    text = STARTS.get(loop, "")
    return text + LOOPS[loop] * ((LENGTH - len(text)) // len(LOOPS[loop]))


@pytest.mark.parametrize("loop", LOOPS)
def test_an_answer_in_a_loop_breaks_nothing(desk: Browser, server: PageServer, loop: str) -> None:
    """100 KB of it: Stop goes, the answer is kept whole, and the page can be used again."""
    text = text_of(loop)
    desk.answer(server, *[text[at : at + 2000] for at in range(0, len(text), 2000)])
    assert desk.one("#send").is_displayed()
    kept = desk.js("return JSON.parse(localStorage.getItem(Object.keys(localStorage)[0])).turns[0].answer")
    assert kept == text
    desk.answer(server, "well")
    assert desk.all(".answer")[-1].text == "well"


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_no_task_is_long(desk: Browser, server: PageServer, loop: str) -> None:
    """On an idle machine; the browser's own measure of tasks."""
    desk.js(WATCH)
    text = text_of(loop)
    desk.answer(server, *[text[at : at + 500] for at in range(0, len(text), 500)])
    assert desk.js("return window.longest") < 200


def blocks(page: Browser) -> list[str]:
    return page.js("return [...document.querySelectorAll('.turn:last-child .answer > *')].map(one => one.outerHTML)")


def test_an_answer_in_pieces_looks_like_the_whole_one(desk: Browser, server: PageServer) -> None:
    desk.answer(server, MIXED)
    desk.wait(lambda: desk.all("math") and desk.all(".hljs-keyword"))
    whole = blocks(desk)
    for size in (1, 7):
        desk.answer(server, *[MIXED[at : at + size] for at in range(0, len(MIXED), size)])
        desk.wait(lambda: blocks(desk) == whole)
    desk.driver.refresh()
    desk.wait(lambda: blocks(desk) == whole)


def test_a_long_list_and_a_long_table_stay_what_they_are(desk: Browser, server: PageServer) -> None:
    rows = "".join(f"| {row} | b |\n" for row in range(1500))
    items = "".join(f"{item + 1}. item {item}\n" for item in range(1200))
    desk.answer(server, f"| a | b |\n| - | - |\n{rows}\n{items}\nThe end.")
    assert [len(desk.all(f".answer {tag}")) for tag in ("tbody tr", "li", "p.raw")] == [1500, 1200, 0]
    assert len([head for head in desk.all(".answer thead") if head.is_displayed()]) == 1
    starts = desk.js(
        "return [...document.querySelectorAll('.answer ol')].map(list => [list.start, list.children.length])"
    )
    assert [start for start, _ in starts] == [1 + sum(count for _, count in starts[:at]) for at in range(len(starts))]


def test_mathematics_and_code_are_set_and_fetched_only_when_needed(page: Browser, server: PageServer) -> None:
    page.driver.get_log("browser")
    loaded = "return performance.getEntriesByType('resource').filter(one => /katex|highlight/.test(one.name)).length"
    page.answer(server, "plain, for $5 and $10")
    assert page.js(loaded) == 0
    assert "for $5 and $10" in page.text(".answer")
    page.answer(server, "$$\\frac{a}{b}$$ and \\(E = mc^2\\), $x_1$:\n\n"
                "\\[\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\\]\n\n"
                "\\textcolor{red}{no} \\( open\n\n```python\ndef f(): return 1\n```\n")  # fmt: skip
    page.wait(lambda: len(page.all("math")) == 4 and page.all(".hljs-keyword"))
    assert [len(page.all(f"math {part}")) for part in ("mfrac", "mtr", "mtd", "msup")] == [1, 2, 4, 1]
    assert page.js("return document.querySelector('mfrac').getBoundingClientRect().height > 10")
    assert page.js(loaded) == 2
    assert "\\( open" in page.text(".turn:last-child .answer")
    page.answer(server, "\\(\\style{color:red}{a} \\href{javascript:alert(1)}{b} \\htmlClass{x}{c} \\unknown\\)")
    assert page.all("#log [style], #log math a, #log .turn:last-child .x") == []
    assert [entry["message"] for entry in page.driver.get_log("browser") if "Security Policy" in entry["message"]] == []


def test_waiting_and_thinking_are_seen(page: Browser, server: PageServer) -> None:
    thinks, answers = threading.Event(), threading.Event()
    server.answers = [[thinks, {"reasoning_content": "hm"}, answers, "so"]]
    page.ask("Go.")
    page.wait(lambda: page.text(".waiting").startswith("waiting for the first token … "))
    assert page.one("#log").get_attribute("aria-busy") == "true"
    thinks.set()
    page.wait(lambda: page.text(".thoughts summary").startswith("thinking … "))
    assert not page.one(".waiting").is_displayed()
    page.wait(lambda: "thinking … 1 s" in page.text(".thoughts summary"))
    answers.set()
    page.idle()
    assert (page.text(".thoughts summary"), page.text(".answer")) == ("thoughts", "so")
    assert page.one("#log").get_attribute("aria-busy") == "false"


def test_text_from_right_to_left_is_set_so(page: Browser, server: PageServer) -> None:
    page.answer(server, "שלום.\n\n- אחת\n- שתיים\n\nEnglish.\n\n1. one", question="مرحبا")
    names = ".user .text, .answer p, .answer ul, .answer ol"
    directions = page.js(
        "return [...document.querySelectorAll(arguments[0])].map(one => getComputedStyle(one).direction)", names
    )
    assert directions == ["rtl", "rtl", "rtl", "ltr", "ltr"]
    page.answer(server, "a \u202egnp.exe and \u2066b\u2069")
    assert page.all(".answer")[-1].text == "a gnp.exe and b"


@pytest.mark.parametrize(
    ("pieces", "said", "kept"),
    [
        pytest.param(["half", CUT], "the answer was cut off: its stream ended before it was whole", "half", id="cut"),
        pytest.param([{"html": "<p>Sign in</p>"}], "what came is no answer of this server", "", id="html"),
        pytest.param([], "the model said nothing", "", id="nothing"),
        pytest.param([{"refused": "prompt " * 9000}], "prompt prompt", "", id="long refusal"),
    ],
)
def test_an_answer_that_is_none_is_told(
    page: Browser, server: PageServer, pieces: list[str], said: str, kept: str
) -> None:
    page.answer(server, *(pieces or [""]))
    assert said in page.text(".turn .error") + page.text(".turn > small")
    assert page.text(".answer") == kept
    assert page.one(".turn").size["height"] < 400


def test_calls_of_tools_are_shown_as_such(page: Browser, server: PageServer) -> None:
    first = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "look_up", "arguments": '{"city": '}}]}
    second = {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}
    page.answer(server, first, second)
    assert (page.text(".call summary"), page.text(".call pre")) == ("calls look_up", '{"city": "Rome"}')
    assert "the model said nothing" not in page.text("#log")


def test_an_answer_that_was_cut_goes_on(page: Browser, server: PageServer) -> None:
    server.finish_reason = "length"
    page.answer(server, "one two ")
    assert "cut at max_tokens" in page.text(".turn > small")
    server.finish_reason, server.answers = "stop", [["three"]]
    page.press("Continue")
    page.wait(lambda: page.text(".answer") == "one two three")
    page.idle()
    assert server.messages() == [("user", "Go."), ("assistant", "one two ")]
    assert (server.asked[-1]["continue_final_message"], server.asked[-1]["add_generation_prompt"]) == (True, False)
    assert "cut at" not in page.text(".turn > small")
    assert "Continue" not in page.text(".turn .actions")


def test_a_model_without_a_template_goes_on_with_a_text(page: Browser, server: PageServer) -> None:
    server.chat_template = None
    page.driver.refresh()
    page.wait(lambda: "no chat template" in page.text("#log"))
    server.finish_reason = "length"
    page.answer(server, " in *Paris*.", question="The tower stands")
    assert page.text(".answer") == " in *Paris*."
    asked = server.asked[-1]
    assert (asked["route"], asked["prompt"], asked["max_tokens"]) == ("/v1/completions", "The tower stands", 256)
    server.answers = [[" It is high."]]
    page.press("Continue")
    page.wait(lambda: page.text(".answer") == " in *Paris*. It is high.")
    assert server.asked[-1]["prompt"] == "The tower stands in *Paris*."


def test_a_server_that_stops_still_answers(desk: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["half", hold, " whole"]]
    desk.ask("Go.")
    desk.wait(lambda: desk.text(".answer") == "half")
    desk.js(
        "const real = window.fetch;"
        "window.fetch = (what, ...rest) => what === 'metrics' ? Promise.reject(new TypeError()) : real(what, ...rest)"
    )
    desk.wait(lambda: desk.text("#state") == "the server is stopping")
    hold.set()
    desk.wait(lambda: desk.text(".answer") == "half whole")
    desk.wait(lambda: desk.text("#state") == "the server cannot be reached")


def test_no_finding_of_axe(page: Browser, server: PageServer, axe: Path) -> None:
    page.answer(server, {"reasoning_content": "hm"}, MIXED + "\n- [x] done\n- [ ] to do\n", question="word " * 400)
    server.answers = [[MIXED]]
    page.press("Regenerate")
    page.idle()
    page.wait(lambda: page.all("math"))
    for opener in (None, "#open-chats", "#open-panel"):
        if opener is not None:
            if not page.one(opener).is_displayed():
                continue
            page.one(opener).click()
        page.driver.execute_script(axe.read_text(encoding="utf-8"))
        found = page.driver.execute_async_script("axe.run().then(arguments[0])")["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"]) for one in found] == []
        page.js("document.getElementById('shade').click()")
