"""One browser and one server, and the page as new for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import DESK, METRICS, PHONES, Browser, PageServer, chromium
from tests.real.cache import cached, fetch_npm

AXE = "axe-core@4.14.1"  # Deque's checks of accessibility, MPL-2.0: run here, and no part of this project


@pytest.fixture(scope="session")
def page_server() -> Iterator[PageServer]:
    server = PageServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def chrome(page_server: PageServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium"), page_server.url) as found:
        yield found


@pytest.fixture
def server(page_server: PageServer) -> PageServer:
    page_server.answers.clear()
    page_server.asked.clear()
    page_server.key, page_server.metrics, page_server.chat_template = "", METRICS, "a template"
    page_server.finish_reason, page_server.max_images = "stop", 20
    return page_server


@pytest.fixture(params=[DESK, PHONES[0]], ids=lambda size: str(size[0]))
def page(request: pytest.FixtureRequest, chrome: Browser, server: PageServer) -> Browser:
    chrome.open(*request.param)
    return chrome


@pytest.fixture
def desk(chrome: Browser, server: PageServer) -> Browser:
    chrome.open(*DESK)
    return chrome


@pytest.fixture(scope="session")
def axe() -> Path:
    return cached(AXE, lambda folder: fetch_npm(AXE, folder, ("axe.min.js",))) / "axe.min.js"
