"""Chats: branches, drafts, tabs, settings, files, search, export."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.page.browser import Browser, PageServer


def open_chats(page: Browser) -> None:
    if not page.one("#chats").is_displayed():
        page.one("#open-chats").click()


def open_settings(page: Browser) -> None:
    if not page.one("#panel").is_displayed():
        page.press("Settings")


def close(page: Browser) -> None:
    page.js("const shade = document.getElementById('shade'); if (!shade.hidden) shade.click()")


def questions(page: Browser) -> list[str]:
    return [text.text for text in page.all(".turn .text")]


def test_the_field_grows_with_what_is_typed(page: Browser, server: PageServer) -> None:
    height = page.one("#prompt").size["height"]
    page.js("document.getElementById('prompt').value = 'one\\ntwo\\nthree\\nfour\\nfive'")
    page.wait(lambda: page.one("#prompt").size["height"] > 2 * height)
    assert page.js("const p = document.getElementById('prompt'); return p.scrollHeight - p.clientHeight") <= 1
    page.js("const p = document.getElementById('prompt'); p.value = 'line\\n'.repeat(500)")
    assert page.one("#prompt").size["height"] < 0.5 * page.js("return innerHeight")
    assert page.one("#send").is_displayed()


def test_two_tabs_with_one_chat_lose_nothing(desk: Browser, server: PageServer) -> None:
    desk.answer(server, "one", question="first")
    tab, address = desk.driver.current_window_handle, desk.driver.current_url
    desk.driver.switch_to.new_window("tab")
    desk.driver.get(address)
    desk.wait(lambda: questions(desk) == ["first"])
    other = desk.driver.current_window_handle
    try:
        hold = threading.Event()
        server.answers = [["four", hold]]
        desk.ask("of the other tab")
        desk.wait(lambda: "four" in desk.text("#log"))
        desk.driver.switch_to.window(tab)
        desk.answer(server, "two", question="second")
        desk.answer(server, "three", question="third")
        desk.driver.switch_to.window(other)
        hold.set()
        desk.idle()
        desk.driver.switch_to.window(tab)
        desk.driver.refresh()
        stored = desk.js("return JSON.parse(localStorage.getItem(Object.keys(localStorage)[0])).turns")
        assert sorted((turn["question"], turn["answer"]) for turn in stored) == [
            ("first", "one"), ("of the other tab", "four"), ("second", "two"), ("third", "three")]  # fmt: skip
        assert all(text in desk.text("#log") for text in ("first", "of the other tab", "second", "third"))
        desk.press("New")
        desk.answer(server, "new", question="another chat")
        desk.driver.switch_to.window(other)
        desk.wait(lambda: "another chat" in desk.js("return document.getElementById('chat-list').textContent"))
    finally:
        desk.driver.switch_to.window(other)
        desk.driver.close()
        desk.driver.switch_to.window(tab)


def test_turns_of_another_tab_come_into_view(desk: Browser, server: PageServer) -> None:
    desk.answer(server, "one", question="first")
    tab, address = desk.driver.current_window_handle, desk.driver.current_url
    desk.driver.switch_to.new_window("tab")
    try:
        desk.driver.get(address)
        desk.wait(lambda: questions(desk) == ["first"])
        desk.answer(server, "two", question="second")
        desk.driver.switch_to.window(tab)
        desk.wait(lambda: desk.text("#log").count("two") == 1)
        desk.answer(server, "three", question="third")
        assert [text for _, text in server.messages()] == ["first", "one", "second", "two", "third"]
    finally:
        handles = [handle for handle in desk.driver.window_handles if handle != tab]
        desk.driver.switch_to.window(handles[0])
        desk.driver.close()
        desk.driver.switch_to.window(tab)


def test_settings_belong_to_the_chat(page: Browser, server: PageServer) -> None:
    open_settings(page)
    assert page.one("#system").size["width"] > 200
    page.one("#system").send_keys("Be brief.\ue008\n\ue008Be kind.")
    page.one("#option-temperature").send_keys("0.5\t")
    close(page)
    page.answer(server, "yes", question="first")
    address = page.driver.current_url
    page.press("New")
    open_settings(page)
    page.one("#system").clear()
    page.one("#option-temperature").send_keys("\b\b\b\t")
    close(page)
    page.answer(server, "no", question="second")
    assert server.messages() == [("user", "second")]
    page.driver.execute_script("sessionStorage.clear()")
    page.driver.get("about:blank")
    page.driver.get(address)
    page.wait(lambda: page.text(".system span") == "Be brief.\nBe kind.")
    page.answer(server, "again", question="third")
    assert server.messages()[0] == ("system", "Be brief.\nBe kind.")
    assert server.asked[-1]["temperature"] == 0.5


def test_any_turn_can_be_edited_had_again_and_deleted(page: Browser, server: PageServer) -> None:
    for question, said in (("a", "1"), ("b", "2"), ("c", "3")):
        page.answer(server, said, question=question)
    page.one("#prompt").send_keys("my draft")
    page.all(".turn .edit")[0].click()
    page.one("textarea.edited").send_keys("\ue00c")
    assert questions(page) == ["a", "b", "c"]
    page.all(".turn .edit")[1].click()
    server.answers = [["4"]]
    page.one("textarea.edited").send_keys("B\n")
    page.wait(lambda: questions(page) == ["a", "bB"])
    page.idle()
    assert server.messages() == [("user", "a"), ("assistant", "1"), ("user", "bB")]
    assert page.text(".branch") == "2/2"
    page.press("‹")
    assert questions(page) == ["a", "b", "c"]
    page.one("#prompt").send_keys(" kept")
    assert page.js("return document.getElementById('prompt').value") == "my draft kept"
    next(button for button in page.all(".turn:nth-child(2) button") if button.text == "Delete").click()
    assert questions(page) == ["a", "bB"]  # the other branch
    page.press("Undo")
    assert questions(page) == ["a", "b", "c"]
    page.driver.refresh()
    page.wait(lambda: questions(page) == ["a", "b", "c"])
    page.wait(lambda: page.js("return document.getElementById('prompt').value") == "my draft kept")


def test_a_deleted_turn_is_no_part_of_the_next_request(page: Browser, server: PageServer) -> None:
    for question, said in (("a", "1"), ("b", "2"), ("c", "3")):
        page.answer(server, said, question=question)
    next(button for button in page.all(".turn:nth-child(2) button") if button.text == "Delete").click()
    assert questions(page) == ["a", "c"]
    page.answer(server, "4", question="d")
    assert [text for _, text in server.messages()] == ["a", "1", "c", "3", "d"]


def test_files_go_with_a_question_and_stay_with_it(page: Browser, server: PageServer, tmp_path: Path) -> None:
    for name, data in (("notes.txt", b"one ``` two\n"), ("a.bin", b"\x00\xff"), ("big.txt", b"x" * 300_000)):
        (tmp_path / name).write_bytes(data)
    page.one("#file").send_keys(str(tmp_path / "notes.txt"))
    page.wait(lambda: page.text("#files summary") == "notes.txt")
    for name, said in (("a.bin", "is no text in UTF-8"), ("big.txt", "a file may have 256 KiB")):
        page.one("#file").send_keys(str(tmp_path / name))
        page.wait(lambda said=said: said in page.text("#notice"))
    page.answer(server, "read", question="What is in it?")
    assert server.messages() == [("user", "notes.txt\n````\none ``` two\n````\n\nWhat is in it?")]
    assert page.text(".user summary") == "notes.txt"
    assert not page.one("#files").is_displayed()
    page.press("Regenerate")
    page.idle()
    page.driver.refresh()
    page.wait(lambda: page.all(".user summary"))
    page.answer(server, "more", question="And?")
    assert "one ``` two" in server.messages()[0][1]


def test_a_dropped_file_is_attached_and_never_opened(desk: Browser, server: PageServer) -> None:
    for target in ("#log", "#prompt"):
        desk.js(
            "const data = new DataTransfer(), place = document.querySelector(arguments[0]);"
            "data.items.add(new File(['dropped'], 'a.md'));"
            "const event = type => new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});"
            "window.stopped = ['dragover', 'drop'].every(type => !place.dispatchEvent(event(type)))",
            target,
        )
        assert desk.js("return window.stopped")
    desk.js(
        "const data = new DataTransfer(); data.items.add(new File(['pasted'], 'b.md'));"
        "const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});"
        "document.getElementById('prompt').dispatchEvent(event)"
    )
    desk.wait(lambda: [name.text for name in desk.all("#files summary")] == ["a.md", "a.md", "b.md"])
    desk.all("#files .chip > button")[0].click()
    desk.answer(server, "read")
    assert server.messages()[0][1].count("dropped") == 1


def test_a_reload_in_mid_stream_is_no_error(page: Browser, server: PageServer) -> None:
    hold = threading.Event()
    server.answers = [["half", hold]]
    page.ask("Talk.")
    page.wait(lambda: page.text(".answer") == "half")
    page.driver.refresh()
    hold.set()
    page.wait(lambda: page.text(".turn > small") == "stopped: the page was left")
    assert page.text(".answer") == "half"
    assert not page.one(".turn .error").is_displayed()


def test_search_titles_export_import_and_undo(page: Browser, server: PageServer) -> None:
    page.answer(server, "the answer is Oslo", question="Capital of Norway?")
    page.press("New")
    page.answer(server, "Rome", question="Capital of Italy?")
    open_chats(page)
    page.one("#search").send_keys("oslo")
    titles = lambda: [title.text for title in page.all("#chat-list .title")]  # noqa: E731
    assert titles() == ["Capital of Norway?"]
    page.one("#search").clear()
    page.one("#search").send_keys(" \b")
    page.all("#chat-list .small")[0].click()
    page.one("#chat-list input").send_keys("Italy\n")
    assert titles() == ["Italy", "Capital of Norway?"]
    assert page.driver.title == "Italy - minisgl-backend"
    page.js(
        "window.saved = null;"
        "URL.createObjectURL = blob => { blob.text().then(text => { window.saved = text; }); return '#'; }"
    )
    page.one("#export").click()
    page.wait(lambda: page.js("return window.saved"))
    exported = page.js("return window.saved")
    assert [chat["settings"]["title"] for chat in json.loads(exported)["chats"]] == ["Italy", ""]
    page.all("#chat-list .delete")[1].click()
    assert titles() == ["Italy"]
    page.press("Undo")
    open_chats(page)
    assert titles()[0] in ("Italy", "Capital of Norway?")
    assert len(titles()) == 2
    page.js("localStorage.clear()")
    give = (
        "const data = new DataTransfer(), field = document.getElementById('import-file');"
        "data.items.add(new File([arguments[0]], 'chats.json')); field.files = data.files;"
        "field.dispatchEvent(new Event('change'))"
    )
    page.js(give, exported)
    page.wait(lambda: sorted(titles()) == ["Capital of Norway?", "Italy"])
    page.js(give, exported)
    page.wait(lambda: page.text("#notice span") == "2 chats are imported")
    assert len(titles()) == 2
    for damaged in ("{", json.dumps({"chats": [{"id": 7}]}), json.dumps({"chats": [{"id": "x", "turns": [None]}]})):
        page.js(give, damaged)
        page.wait(lambda: "chats" in page.text("#notice span") and "imported" not in page.text("#notice span"))
        page.js("document.getElementById('notice').firstChild.textContent = ''")


def test_chats_of_the_page_before_are_read(desk: Browser, server: PageServer) -> None:
    old = {"id": "1-2", "time": 5, "turns": [{"question": "q1", "answer": "a1", "thoughts": "", "state": "done"},
                                            {"question": "q2", "answer": "a2"}]}  # fmt: skip
    desk.js("localStorage.setItem('minisgl.chat.1-2', arguments[0])", json.dumps(old))
    desk.driver.get(desk.url + "#1-2")
    desk.driver.refresh()
    desk.wait(lambda: questions(desk) == ["q1", "q2"])
    desk.answer(server, "a3", question="q3")
    assert [text for _, text in server.messages()] == ["q1", "a1", "q2", "a2", "q3"]


def test_back_leads_to_the_chat_before(desk: Browser, server: PageServer) -> None:
    desk.answer(server, "1", question="first")
    desk.press("New")
    desk.answer(server, "2", question="second")
    desk.driver.back()
    desk.driver.back()
    desk.wait(lambda: questions(desk) in (["first"], []))
    desk.driver.forward()
    desk.driver.forward()
    desk.wait(lambda: questions(desk) == ["second"])


@pytest.mark.parametrize("width", [1280, 2560])
def test_the_field_is_as_wide_as_the_text(chrome: Browser, server: PageServer, width: int) -> None:
    chrome.open(width, 900)
    chrome.answer(server, "word " * 200)
    assert chrome.one("form").size["width"] >= chrome.one(".answer").size["width"]
    field = chrome.js(
        "const [left, right] = ['prompt', 'send'].map(id => document.getElementById(id).getBoundingClientRect());"
        "return right.right - left.left"
    )
    assert field < 1.3 * chrome.one(".answer").size["width"]
