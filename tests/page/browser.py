"""Chromium without a screen, and a server for the page whose answers a test decides."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from minisgl_backend.openai.page import add_page
from tests.e2e.conftest import free_ports

PATIENCE_SECONDS = 60.0
DESK, PHONES = (1280, 800), ((390, 844), (360, 740))  # CSS pixels
METRICS = """minisgl_engine_up 1
minisgl_requests_running 3
minisgl_requests_waiting 1
minisgl_kv_pages{state="total"} 200
minisgl_kv_pages{state="leased"} 50
minisgl_generated_tokens_total 1000
minisgl_inter_token_seconds_count 900
minisgl_inter_token_seconds_sum 4.5
"""
DRAFTS = """minisgl_drafts_total {drafts}
minisgl_draft_tokens_total{{position="1"}} {drafts}
minisgl_draft_tokens_total{{position="2"}} {drafts}
minisgl_accepted_draft_tokens_total{{position="1"}} {first}
"""

Pieces = list[str | threading.Event | dict[str, Any]]
CUT: dict[str, Any] = {"cut": True}
"""A piece behind which the stream ends, though the answer does not."""


class PageServer:
    """The page's own files beside routes that answer as they are told, and remember what they were asked."""

    def __init__(self) -> None:
        self.answers: list[Pieces] = []  # of the next requests: texts, events to wait for, whole chunks
        self.asked: list[dict[str, Any]] = []
        self.key = ""  # needed where it is not empty
        self.metrics = METRICS
        self.chat_template: str | None = "a template"
        self.max_images: int | None = 20
        self.finish_reason = "stop"
        self.port = free_ports(1)[0]
        app = FastAPI()
        add_page(app)
        app.get("/metrics")(self._metrics)
        app.get("/v1/models")(self._models)
        app.get("/tokenizer_info")(self._tokenizer_info)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._chat)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)

    def messages(self) -> list[tuple[str, str]]:
        """(role, content) of the last request's."""
        return [(message["role"], message["content"]) for message in self.asked[-1]["messages"]]

    async def _metrics(self) -> Response:
        return PlainTextResponse(self.metrics)

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "this server needs an API key"}}, 401)
        return JSONResponse({"data": [{"id": "a-model"}]})

    async def _tokenizer_info(self) -> Response:
        return JSONResponse({"chat_template": self.chat_template, "max_images": self.max_images})

    async def _chat(self, request: Request) -> Response:
        self.asked.append({**await request.json(), "route": request.url.path})
        pieces = self.answers.pop(0) if self.answers else ["an answer"]
        if pieces and isinstance(pieces[0], dict) and "refused" in pieces[0]:
            return JSONResponse({"error": {"message": pieces[0]["refused"]}}, 400)
        if pieces and isinstance(pieces[0], dict) and "html" in pieces[0]:
            return HTMLResponse(pieces[0]["html"])
        return StreamingResponse(self._stream(pieces), media_type="text/event-stream")

    async def _stream(self, pieces: Pieces) -> AsyncIterator[str]:
        for piece in pieces:
            if isinstance(piece, threading.Event):
                while not piece.is_set():
                    await asyncio.sleep(0.01)
                continue
            if piece is CUT:
                return
            choice = {"delta": piece} if isinstance(piece, dict) else {"delta": {"content": piece}, "text": piece}
            yield f"data: {json.dumps({'choices': [{'finish_reason': None, **choice}]})}\n\n"
        done = {"choices": [{"delta": {}, "text": "", "finish_reason": self.finish_reason}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(pieces)}}
        yield f"data: {json.dumps(done)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n"


class Browser:
    """One tab, and what tests do in it."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, width: int, height: int, dark: bool = False) -> None:
        """The page as new, in a window of that many CSS pixels; below 760 it is a phone's with touch."""
        phone = width < 760
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get(self.url)
        self.driver.execute_script(
            "document.getElementById('prompt').value = ''; localStorage.clear(); sessionStorage.clear()"
        )
        self.driver.get(self.url)
        self.wait(lambda: self.text("#state") == "ready")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, PATIENCE_SECONDS, 0.05).until(lambda _: condition())

    def press(self, label: str) -> None:
        """The last button of that name."""
        next(
            button for button in reversed(self.all("button")) if button.is_displayed() and button.text == label
        ).click()

    def answer(
        self, server: PageServer, *pieces: str | threading.Event | dict[str, Any], question: str = "Go."
    ) -> None:
        """Asks, and waits for the end of an answer of these pieces."""
        server.answers.append(list(pieces))
        asked = len(server.asked)
        self.ask(question)
        self.wait(lambda: len(server.asked) > asked)
        self.idle()

    def ask(self, text: str) -> None:
        self.one("#prompt").send_keys(text + "\n")

    def idle(self) -> None:
        self.wait(lambda: not self.one("#stop").is_displayed())

    def screenshot(self, file: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def chromium(folder: Path, url: str) -> Iterator[Browser]:
    """Skips where there is none; continuous integration has one."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        assert not os.environ.get("CI"), "continuous integration has a browser and its driver; see .ci/run"
        pytest.skip("no Chromium, or no chromedriver, to look at the page with")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-proxy-server"):
        options.add_argument(f"--{option}")
    options.add_argument(f"--user-data-dir={folder}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(driver)) as found:
        yield Browser(found, url)
