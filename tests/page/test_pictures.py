"""Pictures of questions: attached in every way, seen, sent, kept in the browser, exported."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from tests.page.browser import Browser, PageServer
from tests.seeing import encoded


def drawn(colour: str, width: int = 320, height: int = 200) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((width // 4, height // 8, width * 3 // 4, height * 7 // 8), fill=colour)
    return image


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {"red.png": encoded(drawn("red")), "blue.jpg": encoded(drawn("blue", 200, 320), "JPEG"), "notes.txt": b"two"}
    made |= {"big.png": bytes(21 << 20), "photo.heic": b"\xff\x00", "drawing.svg": b"<svg></svg>"}
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in made}


def attach(page: Browser, file: Path) -> None:
    chips = len(page.all("#files .chip"))
    page.one("#file").send_keys(str(file))
    page.wait(lambda: len(page.all("#files .chip")) == chips + 1)


def are_seen(page: Browser, selector: str, count: int) -> bool:
    widths = page.js("return [...document.querySelectorAll(arguments[0])].map(one => one.naturalWidth)", selector)
    return len(widths) == count and all(widths)


def url_of(file: Path, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def part_of(file: Path, kind: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(file, kind)}}


def test_pictures_go_with_a_question_and_stay_with_it(
    page: Browser, server: PageServer, files: dict[str, Path]
) -> None:
    for name in ("red.png", "notes.txt", "blue.jpg"):
        attach(page, files[name])
    page.wait(lambda: are_seen(page, "#files img", 2))
    page.answer(server, "Two ellipses.", question="What is it?")
    content = [
        part_of(files["red.png"], "png"),
        {"type": "text", "text": "notes.txt\n```\ntwo\n```"},
        part_of(files["blue.jpg"], "jpeg"),
        {"type": "text", "text": "What is it?"},
    ]
    assert server.messages() == [("user", content)]
    assert not page.one("#files").is_displayed()
    assert page.js("return JSON.stringify(localStorage).length") < 2000  # the pictures are elsewhere
    page.driver.refresh()
    page.wait(lambda: are_seen(page, ".user img", 2))
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    page.answer(server, "Red.", question="And the first?")
    assert server.messages() == [("user", content), ("assistant", "Two ellipses."), ("user", "And the first?")]
    picture = page.one(".user .picture")
    picture.click()
    assert picture.get_attribute("aria-expanded") == "true"
    page.all(".turn button.edit")[0].click()
    page.one(".edited").send_keys(" Say it.\n")
    page.wait(lambda: len(server.asked) == 3)
    page.idle()
    assert server.messages()[0][1][:3] == content[:3]


def test_pictures_are_pasted_dropped_and_removed(desk: Browser, server: PageServer, files: dict[str, Path]) -> None:
    desk.js(
        "const bytes = Uint8Array.from(atob(arguments[0]), one => one.charCodeAt(0)), made = name => {"
        "  const data = new DataTransfer(); data.items.add(new File([bytes], name, {type: 'image/png'}));"
        "  return data; };"
        "document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste',"
        "  {clipboardData: made('pasted.png'), bubbles: true, cancelable: true}));"
        "window.stopped = !document.getElementById('log').dispatchEvent(new DragEvent('drop',"
        "  {dataTransfer: made('dropped.png'), bubbles: true, cancelable: true}));",
        base64.b64encode(files["red.png"].read_bytes()).decode(),
    )
    assert desk.js("return window.stopped")
    desk.wait(lambda: are_seen(desk, "#files img", 2))
    desk.one("button[aria-label='Remove pasted.png']").click()
    desk.answer(server, "seen", question="")
    assert server.messages() == [("user", [part_of(files["red.png"], "png")])]


def test_what_is_no_picture_for_the_model_is_told(desk: Browser, server: PageServer, files: dict[str, Path]) -> None:
    attach(desk, files["drawing.svg"])  # a text
    for name, said in (("big.png", "a file may have 20 MiB"), ("photo.heic", "photo.heic is no ")):
        desk.one("#file").send_keys(str(files[name]))
        desk.wait(lambda said=said: said in desk.text("#notice"))
    desk.js(
        "const data = new DataTransfer(); data.items.add(new File(['x'], 'a.heic', {type: 'image/heic'}));"
        "const pasted = new ClipboardEvent('paste', {clipboardData: data, bubbles: true});"
        "document.getElementById('prompt').dispatchEvent(pasted)"
    )
    desk.wait(lambda: "a.heic is no picture that this browser can read" in desk.text("#notice"))
    for count, said in ((0, "this model sees no pictures"), (1, "takes at most 1 pictures")):
        server.max_images = count
        desk.driver.refresh()
        desk.wait(lambda: desk.text("#state") == "ready")
        desk.one("#file").send_keys("\n".join(str(files[name]) for name in ("red.png", "blue.jpg")))
        desk.wait(lambda said=said: said in desk.text("#notice"))


def test_pictures_that_are_gone_are_told_by_name(desk: Browser, server: PageServer, files: dict[str, Path]) -> None:
    attach(desk, files["red.png"])
    desk.answer(server, "seen", question="What?")
    desk.driver.get("about:blank")
    desk.driver.get(desk.url + "page/api.html")
    desk.driver.execute_async_script(
        "const done = arguments[0], asked = indexedDB.deleteDatabase('minisgl'); asked.onsuccess = () => done()"
    )
    desk.driver.back()
    desk.driver.back()
    desk.wait(lambda: desk.all(".user .picture") and "red.png: not kept any more" in desk.text(".user .picture"))
    desk.ask("And?")
    desk.wait(lambda: "red.png is not kept in this browser any more" in desk.all(".turn .error")[-1].text)
    assert len(server.asked) == 1


IMPORT = (
    "const data = new DataTransfer(), field = document.getElementById('import-file');"
    "data.items.add(new File([arguments[0]], 'chats.json')); field.files = data.files;"
    "field.dispatchEvent(new Event('change'))"
)


def test_imported_pictures_get_ids_of_their_own(desk: Browser, server: PageServer, files: dict[str, Path]) -> None:
    attach(desk, files["red.png"])
    desk.answer(server, "seen", question="mine")
    (kept,) = desk.js("return JSON.parse(localStorage.getItem(Object.keys(localStorage)[0])).turns[0].files")
    theirs = {"newest and largest": "zzzzzzzzz-zzzzzz-1", "same": kept["data"]}
    chats = [
        {"id": name, "turns": [{"question": name, "answer": "", "thoughts": "", "files": [{**kept, "data": id}]}]}
        for name, id in theirs.items()
    ]
    pictures = dict.fromkeys(theirs.values(), url_of(files["blue.jpg"], "jpeg"))
    desk.js(IMPORT, json.dumps({"chats": chats, "pictures": pictures}))
    desk.wait(lambda: desk.text("#notice span") == "2 chats are imported")
    for _ in range(2):
        desk.driver.refresh()  # drops pictures that are too many
        desk.wait(lambda: are_seen(desk, ".user img", 1))
        assert desk.js("return document.querySelector('.user img').src") == url_of(files["red.png"], "png")
    for name in theirs:
        next(title for title in desk.all("#chat-list .title") if title.text == name).click()
        desk.wait(lambda name=name: desk.text(".user .text") == name and are_seen(desk, ".user img", 1))
        assert desk.js("return document.querySelector('.user img').src") == url_of(files["blue.jpg"], "jpeg")


@pytest.mark.parametrize("kind", ["constructor", "__proto__", "video"])
def test_imported_attachments_of_unknown_kinds_are_seen_by_name(desk: Browser, server: PageServer, kind: str) -> None:
    turn = {"question": "q", "answer": "a", "thoughts": "", "files": [{"kind": kind, "name": "a name", "data": "x"}]}
    desk.js(IMPORT, json.dumps({"chats": [{"id": "one", "turns": [turn]}]}))
    desk.wait(lambda: desk.all("#chat-list .title"))
    desk.one("#chat-list .title").click()
    desk.wait(lambda: desk.text(".user summary") == "a name")
    desk.answer(server, "more", question="And?")
    assert server.messages()[0] == ("user", "q")


def test_files_that_come_at_the_same_time_are_counted_together(desk: Browser, server: PageServer) -> None:
    desk.js(
        "window.paste = names => {"
        "  const data = new DataTransfer(); for (const name of names) data.items.add(new File(['x'], name));"
        "  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});"
        "  document.getElementById('prompt').dispatchEvent(event); };"
        "paste(['0', '1', '2', '3', '4', '5']); paste(['6', '7', '8', '9', '10', '11']);"
    )
    desk.wait(lambda: desk.text("#notice span") == "at most 10 files go with a question")
    assert [name.text for name in desk.all("#files summary")] == list("012345")
    desk.js("paste(['6']); document.querySelector('#files .chip > button').click()")
    desk.wait(lambda: [name.text for name in desk.all("#files summary")] == list("123456"))
    desk.answer(server, "read", question="mine")
    desk.js("paste(['late']); document.getElementById('new').click()")
    desk.js("paste(['own'])")
    desk.wait(lambda: [name.text for name in desk.all("#files summary")] == ["own"])


def test_exports_have_the_pictures(desk: Browser, server: PageServer, files: dict[str, Path]) -> None:
    attach(desk, files["red.png"])
    desk.answer(server, "seen", question="What?")
    desk.js(
        "window.saved = null;"
        "URL.createObjectURL = blob => { blob.text().then(text => { window.saved = text; }); return '#'; }"
    )
    desk.one("#export").click()
    desk.wait(lambda: desk.js("return window.saved"))
    exported = desk.js("return window.saved")
    assert list(json.loads(exported)["pictures"].values()) == [url_of(files["red.png"], "png")]
    desk.driver.execute_async_script(
        "const done = arguments[0]; localStorage.clear();"
        "import('/page/pictures.js').then(({tidyPictures}) => tidyPictures(new Set(), 0)).then(done)"
    )
    desk.driver.get(desk.url)
    desk.js(IMPORT, exported)
    desk.wait(lambda: desk.all("#chat-list .title"))
    desk.one("#chat-list .title").click()
    desk.wait(lambda: are_seen(desk, ".user img", 1))
    desk.answer(server, "red", question="And?")
    assert server.messages()[0][1][0] == part_of(files["red.png"], "png")
