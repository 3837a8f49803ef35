"""The page to chat, in Chromium: on a desk and on phones, light and dark."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.page.browser import DESK, DRAFTS, METRICS, PHONES, Browser, PageServer

MARKDOWN = """# A heading

Some **bold** words, `code` and [a link](https://example.org/).

```python
def add(a, b):
    return a + b  # a line that is longer than any phone is wide, and has to be scrolled sideways to be read
```

| name | value |
| --- | ---: |
| one | 1 |

1. first
2. second
"""
ATTACKS = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

<svg onload="window.hacked = 3"><iframe src="javascript:parent.hacked = 4"></iframe>

[a](javascript:window.hacked=5) ![b](http://127.0.0.1:9/pixel.png) <a href="data:text/html,x" onclick="hacked = 6">c</a>

```html"><img src=x onerror=hacked=7>
<script>window.hacked = 8</script>
```
"""


def at_end(page: Browser) -> bool:
    return bool(
        page.js("const l = document.getElementById('log'); return l.scrollHeight - l.scrollTop - l.clientHeight < 2")
    )


def fits(page: Browser) -> bool:
    """Nothing is wider than the window, and the line to write in is in view, with its button."""
    width, height = page.js("return [innerWidth, innerHeight]")
    scrolled = page.js("return [document.documentElement.scrollWidth, document.getElementById('log').scrollWidth - "
                       "document.getElementById('log').clientWidth, scrollY]")  # fmt: skip
    boxes = [page.js("const r = arguments[0].getBoundingClientRect(); return [r.left, r.right, r.bottom]", element)
             for element in (*page.all("#prompt"), *page.all("#send, #stop"), *page.all("#new"))]  # fmt: skip
    return scrolled == [width, 0, 0] and all(x >= 0 and right <= width and y <= height for x, right, y in boxes)


def test_new_during_a_stream_leaves_the_old_answer_in_its_chat(page: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["1, 2, ", hold, "3"], ["fresh"]]
    page.ask("Count.")
    page.wait(lambda: "1, 2," in page.text("#log"))
    page.press("New")
    hold.set()
    page.ask("Again?")
    page.wait(lambda: "fresh" in page.text("#log"))
    assert server.messages() == [("user", "Again?")]
    assert "1, 2" not in page.text("#log")
    page.idle()
    page.ask("More?")
    page.wait(lambda: len(server.asked) == 3)
    assert server.messages() == [("user", "Again?"), ("assistant", "fresh"), ("user", "More?")]


@pytest.mark.parametrize("size", [DESK, *PHONES], ids=lambda size: str(size[0]))
def test_the_page_fits_and_follows_the_answer(chrome: Browser, server: PageServer, size: tuple[int, int]) -> None:
    page = chrome
    page.open(*size)
    assert fits(page)
    server.answers = [[MARKDOWN + "x" * 300], *[["word " * 60]] * 5]
    for turn in range(6):
        page.ask(f"Question {turn} of a length that needs more than one line on any phone that there is")
        page.wait(lambda turn=turn: len(page.all(".turn > small")) > turn and page.all(".turn > small")[turn].text)
        page.idle()
        assert fits(page)
        page.wait(lambda: at_end(page))
    note = page.all(".turn > small")[-1]
    assert "tokens in" in note.text
    assert page.js("return arguments[0].getBoundingClientRect().bottom <= document.getElementById('form')"
                   ".getBoundingClientRect().top", note)  # fmt: skip


def test_a_reader_who_scrolled_up_stays_there(page: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["word\n\n" * 60, hold, "end\n\n" * 10]]
    page.ask("Talk.")
    page.wait(lambda: page.text("#log").count("word") == 60)
    page.js("document.getElementById('log').scrollTop = 0")
    hold.set()
    page.wait(lambda: page.text("#log").count("end") == 10)
    page.idle()
    assert page.js("return document.getElementById('log').scrollTop") == 0


def test_drafts_are_shown_where_the_engine_speculates(desk: Browser, server: PageServer) -> None:
    desk.wait(lambda: desk.text("#value-running") == "3")
    assert not desk.one("#figure-drafts").is_displayed()
    for drafts, first in ((10, 5), (20, 13)):
        server.metrics = METRICS + DRAFTS.format(drafts=drafts, first=first)
        share = round(100 * first / drafts)
        desk.wait(lambda share=share: desk.text("#accepted") == f"accepted, by position: {share} / 0 %")
    assert desk.text("#value-drafts") == "1.80"
    assert desk.one("#figure-drafts").is_displayed()


def test_an_input_methods_enter_sends_nothing(page: Browser, server: PageServer) -> None:
    page.one("#prompt").send_keys("にほん")
    for way in ("isComposing: true", "keyCode: 229"):
        page.js(f"document.getElementById('prompt').dispatchEvent(new KeyboardEvent('keydown', "
                f"{{key: 'Enter', bubbles: true, cancelable: true, {way}}}))")  # fmt: skip
    assert page.js("return document.getElementById('prompt').value") == "にほん"
    assert server.asked == []
    page.ask("go")
    page.wait(lambda: server.asked)
    assert server.messages() == [("user", "にほんgo")]


def test_stop_before_the_first_token_leaves_no_question_behind(page: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [[hold, "late"]]
    page.ask("First?")
    page.wait(lambda: server.asked)
    page.press("Stop")
    page.idle()
    hold.set()
    assert page.text(".turn > small") == "stopped before the first token"
    page.ask("Second?")
    page.wait(lambda: len(server.asked) == 2)
    assert server.messages() == [("user", "Second?")]


def test_escape_stops_and_a_stopped_answer_says_so(page: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["half an answer", hold]]
    page.ask("Talk.")
    page.wait(lambda: "half an answer" in page.text("#log"))
    page.one("#prompt").send_keys("typed meanwhile\ue00c")
    page.idle()
    hold.set()
    assert page.text(".turn > small") == "stopped"
    page.one("#prompt").send_keys("\n")
    page.wait(lambda: len(server.asked) == 2)
    assert [content for _, content in server.messages()] == ["Talk.", "half an answer", "typed meanwhile"]


def test_a_key_that_is_entered_later_names_the_model(page: Browser, server: PageServer) -> None:
    server.key = "secret"
    page.driver.refresh()
    page.wait(lambda: page.text("#model") == "this server needs an API key")
    page.press("Enter the key")
    page.one("#api_key").send_keys("secret\t")
    page.wait(lambda: page.text("#model") == "a-model")


def test_what_goes_wrong_is_said_in_words(desk: Browser, server: PageServer) -> None:
    server.answers = [[{"refused": "prompt is too long"}]]
    desk.ask("What?")
    desk.wait(lambda: "prompt is too long" in desk.text("#log"))
    desk.idle()
    gone = PageServer()
    gone.start()
    desk.driver.get(gone.url)
    desk.wait(lambda: desk.text("#state") == "ready")
    gone.stop()
    desk.wait(lambda: desk.text("#state") == "the server cannot be reached")
    desk.ask("Hello?")
    desk.wait(lambda: desk.text(".message.error") == "the server cannot be reached")


def test_markdown_becomes_elements_and_code_can_be_copied(page: Browser, server: PageServer) -> None:
    server.answers = [[MARKDOWN[cut : cut + 7] for cut in range(0, len(MARKDOWN), 7)]]
    page.ask("Show.")
    page.wait(lambda: page.all(".turn > small") and page.text(".turn > small"))
    found = [[cell.text for cell in page.all(f".answer {name}")] for name in ("h1", "strong", "td", "li", "p code")]
    assert found == [["A heading"], ["bold"], ["one", "1"], ["first", "second"], ["code"]]
    assert page.text(".code span") == "python"
    assert fits(page)
    page.js("window.copied = ''; navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.one(".code button").click()
    page.wait(lambda: page.text(".code button") == "Copied")
    assert page.js("return window.copied").startswith("def add(a, b):\n    return a + b")
    page.all(".turn .actions button")[0].click()
    page.wait(lambda: page.js("return window.copied") == MARKDOWN)


def test_html_of_an_answer_is_never_executed(desk: Browser, server: PageServer) -> None:
    desk.driver.get_log("browser")
    server.answers = [[*ATTACKS], [{"reasoning_content": ATTACKS}, ATTACKS.replace("```", "")]]
    for number, text in enumerate(("Attack.", "<img src=x onerror='window.hacked=9'>")):
        desk.ask(text)
        desk.wait(
            lambda number=number: len(desk.all(".turn > small")) > number and desk.all(".turn > small")[number].text
        )
        desk.idle()
    desk.driver.refresh()
    desk.wait(lambda: len(desk.all(".turn")) == 2)
    assert desk.js("return window.hacked") is None
    assert desk.all("#log img, #log script, #log svg, #log iframe, #log [onclick], #log [onerror]") == []
    assert "<script>window.hacked = 2</script>" in desk.text("#log")
    links = [link.get_attribute("href") for link in desk.all(".answer a")]
    assert not [link for link in links if link and not link.startswith("http")]
    assert [entry["message"] for entry in desk.driver.get_log("browser") if "Security Policy" in entry["message"]] == []


def test_an_answer_can_be_had_again_and_the_question_changed(page: Browser, server: PageServer) -> None:
    server.answers = [["first"], ["second"], ["third"], [{"refused": "full"}]]
    page.ask("Question")
    page.wait(lambda: page.text(".turn > small"))
    page.press("Regenerate")
    page.wait(lambda: page.text(".answer") == "second" and page.text(".turn > small"))
    assert server.messages() == [("user", "Question")]
    page.idle()
    page.press("Edit")
    page.one("textarea.edited").send_keys(" two\n")
    page.wait(lambda: page.text(".answer") == "third")
    page.idle()
    assert server.messages() == [("user", "Question two")]
    assert len(page.all(".turn")) == 1
    page.press("Regenerate")
    page.wait(lambda: page.text(".message.error") == "full")
    page.idle()
    assert page.text(".branch") == "4/4"
    page.press("‹")  # a refusal takes nothing away
    assert (page.text(".branch"), page.text(".answer")) == ("3/4", "third")


def test_chats_outlive_a_reload_and_can_be_deleted(page: Browser, server: PageServer) -> None:
    page.ask("Remember me")
    page.wait(lambda: page.text(".turn > small"))
    page.idle()
    page.press("New")
    assert len(page.all("#empty button")) == 3
    page.ask("Another chat")
    page.wait(lambda: page.text(".turn > small"))
    page.idle()
    page.driver.refresh()
    page.wait(lambda: "Another chat" in page.text("#log"))

    def chats() -> list[str]:
        if not page.one("#chats").is_displayed():
            page.one("#open-chats").click()
        return [title.text for title in page.all("#chat-list .title")]

    assert chats() == ["Another chat", "Remember me"]
    page.press("Remember me")
    page.wait(lambda: "Remember me" in page.text("#log"))
    page.ask("And now?")
    page.wait(lambda: len(server.asked) == 3)
    assert server.messages() == [("user", "Remember me"), ("assistant", "an answer"), ("user", "And now?")]
    page.idle()
    assert chats() == ["Remember me", "Another chat"]
    page.all("#chat-list .delete")[0].click()
    page.wait(lambda: page.all("#empty"))
    assert chats() == ["Another chat"]
    page.driver.refresh()
    page.wait(lambda: page.all("#empty"))
    assert chats() == ["Another chat"]
    page.one("#delete-all").click()
    page.driver.switch_to.alert.accept()
    page.wait(lambda: not page.all("#chat-list .title"))


def test_a_reload_during_a_stream_keeps_what_came(desk: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["half", hold]]
    desk.ask("Talk.")
    desk.wait(lambda: "half" in desk.text("#log"))
    desk.driver.refresh()
    hold.set()
    desk.wait(lambda: "half" in desk.text("#log"))


def test_what_is_kept_is_bounded(desk: Browser, server: PageServer) -> None:
    desk.js("for (let n = 0; n < 70; n++) localStorage.setItem(`minisgl.chat.${n}`, JSON.stringify("
            "{id: `${n}`, time: n, turns: [{question: `q${n}`, answer: 'a'.repeat(n === 69 ? 1.9e6 : 30000)}]}));"
            "localStorage.setItem('minisgl.chat.bad', '{')")  # fmt: skip
    desk.ask("One more")
    desk.wait(lambda: desk.text(".turn > small"))
    desk.idle()
    titles = [title.text for title in desk.all("#chat-list .title")]
    assert titles[:3] == ["One more", "q69", "q68"]
    assert sum(desk.js("return Object.values(localStorage).map(text => text.length)")) < 2_100_000


def test_examples_ask_and_a_link_only_fills_in(page: Browser, server: PageServer) -> None:
    page.press("What is 17 + 25?")
    page.wait(lambda: page.text(".answer") == "an answer")
    assert server.messages() == [("user", "What is 17 + 25?")]
    page.idle()
    page.driver.get(f"{page.url}?q=a+question")
    page.wait(lambda: page.js("return document.getElementById('prompt').value") == "a question")
    assert len(server.asked) == 1


def test_sampling_options_go_with_the_request(page: Browser, server: PageServer) -> None:
    if not page.one("#option-temperature").is_displayed():
        page.press("Settings")
    for name, value in (("option-temperature", "0"), ("option-stop", "END"), ("system", "Be brief.")):
        page.one(f"#{name}").send_keys(value + "\t")
    page.js("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    page.ask("Go.")
    page.wait(lambda: server.asked)
    assert {name: server.asked[0].get(name) for name in ("temperature", "stop", "top_k")} == {
        "temperature": 0, "stop": "END", "top_k": None}  # fmt: skip
    assert server.messages()[0] == ("system", "Be brief.")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, *PHONES], ids=lambda size: str(size[0]))
def test_text_can_be_read(
    chrome: Browser, server: PageServer, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    """Contrast as WCAG's level AA asks; MINISGL_SCREENSHOTS=FOLDER keeps the pictures."""
    page = chrome
    page.open(*size, dark=dark)
    kept = Path(os.environ.get("MINISGL_SCREENSHOTS") or tmp_path)
    name = f"{size[0]}-{'dark' if dark else 'light'}"
    page.screenshot(kept / f"{name}-empty.png")
    server.answers = [[{"reasoning_content": "Let me think."}, MARKDOWN], [{"refused": "prompt is too long"}]]
    page.ask("Show me what you can do.")
    page.wait(lambda: page.text(".turn > small"))
    page.idle()
    page.screenshot(kept / f"{name}-answer.png")
    page.ask("And more?")
    page.wait(lambda: page.all(".turn .error")[-1].text == "prompt is too long")
    page.screenshot(kept / f"{name}-refused.png")
    for opener in ("open-chats", "open-panel"):
        if page.one(f"#{opener}").is_displayed():
            page.one(f"#{opener}").click()
            page.wait(lambda: page.one("#shade").is_displayed())
            page.screenshot(kept / f"{name}-{opener}.png")
            page.js("document.getElementById('shade').click()")
    ratios = page.js("""
        const channel = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const colour = text => text.match(/[\\d.]+/g).map(Number);
        const light = c => 0.2126 * channel(c[0] / 255) + 0.7152 * channel(c[1] / 255) + 0.0722 * channel(c[2] / 255);
        const back = colour(getComputedStyle(document.body).backgroundColor);
        const names = [[".answer p", 0], [".answer a", 0], [".message.error:not([hidden])", 0], ["#send", 1]];
        return names.map(([name, own]) => {
          const style = getComputedStyle(document.querySelector(name));
          const [a, b] = [light(colour(style.color)), light(own ? colour(style.backgroundColor) : back)];
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });""")
    assert min(ratios) >= 4.5, ratios
