"""What pages of other origins can do to a server on this machine, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import Browser, PageServer
from tests.unit.openai.scripted_app import ScriptedApp, scripted_app

TRY = """
const [url, done] = [arguments[0], arguments[1]];
const form = new FormData();
form.append("purpose", "batch");
form.append("file", new File(["{}"], "a.jsonl"));
const chat = JSON.stringify({messages: [{role: "user", content: "hi"}]});
const headers = {"Content-Type": "application/json"};
const tries = {
  read: () => fetch(url + "/v1/files"),
  upload: () => fetch(url + "/v1/files", {method: "POST", body: form}),
  uploadBlind: () => fetch(url + "/v1/files", {method: "POST", body: form, mode: "no-cors"}),
  ask: () => fetch(url + "/v1/chat/completions", {method: "POST", body: chat, headers}),
  askBlind: () => fetch(url + "/v1/chat/completions", {method: "POST", body: chat, mode: "no-cors"}),
  delete: () => fetch(url + "/v1/files/file-1", {method: "DELETE"}),
};
(async () => {
  const found = {};
  for (const [name, go] of Object.entries(tries))
    found[name] = await go().then(reply => reply.status, () => "refused");
  done(found);
})();
"""


def tried(desk: Browser, url: str) -> dict[str, Any]:
    return dict(desk.driver.execute_async_script(TRY, url))


def num_files(app: ScriptedApp) -> int:
    return len(app.ask("GET", "/v1/files")[1]["data"])


def test_another_origins_page_can_do_nothing(
    desk: Browser, server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_app(tmp_path / "state", monkeypatch, files_folder=str(tmp_path / "files")) as app:
        for url in (app.url, app.url.replace("127.0.0.1", "localhost")):
            found = tried(desk_without_policy(desk, server.url.rstrip("/")), url)
            assert {found[name] for name in ("read", "upload", "ask", "delete")} == {"refused"}
        assert (num_files(app), app.server.prompts) == (0, [])
        assert app.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})[0] == 200
        desk.driver.get(app.url)  # the own page
        found = tried(desk, "")
        assert (found["read"], found["upload"], found["ask"], found["delete"]) == (200, 200, 200, 404)
        assert num_files(app) == 2
        assert app.ask("GET", "/v1/files", Host="rebound.example")[0] == 403


def test_pages_of_allowed_origins_can(
    desk: Browser, server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = server.url.rstrip("/")
    settings = {"files_folder": str(tmp_path / "files"), "allowed_origins": (origin,)}
    with scripted_app(tmp_path / "state", monkeypatch, **settings, allowed_hosts=("proxy.example",)) as app:
        found = tried(desk_without_policy(desk, origin), app.url)
        assert (found["read"], found["upload"], found["ask"]) == (200, 200, 200)
        assert app.ask("GET", "/v1/files", Host="proxy.example")[0] == 200


def desk_without_policy(desk: Browser, origin: str) -> Browser:
    """The page's own policy lets it ask nobody else; a plain page of that origin has none."""
    desk.driver.get(f"{origin}/v1/models")
    return desk
