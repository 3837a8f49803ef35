"""A family of routes is a file and a row: a toy that a test adds is admitted, answered and refused as all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.openai.routes.table import FAMILIES, Family
from tests.toys import shouting_routes
from tests.unit.openai.scripted_app import Said, scripted_app

ROW = Family(shouting_routes.add_routes, open_paths=("/shout/*",), body_limits={"/v1/shout": 200})
KEY = {"Authorization": "Bearer one"}


def test_a_toy_is_a_file_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(prompt: object) -> Said:
        return Said(("hel", "lo")) if "fail" not in str(prompt) else Said(("hel",), error="top_k is -7; allowed: 0")

    with scripted_app(tmp_path, monkeypatch, answer, families=(*FAMILIES, ROW), api_keys=("one",)) as app:
        assert app.ask("POST", "/v1/shout", {"prompt": "a"}, **KEY) == (200, {"shout": "HELLO"})
        status, text = app.ask("POST", "/v1/shout", {"prompt": "a", "stream": True}, **KEY)
        assert (status, text.split("\n\n")) == (
            200,
            ['data: {"shout":"HEL"}', 'data: {"shout":"LO"}', "data: [DONE]", ""],
        )
        # What every route has: names of fields in errors, the model's name, the server's errors, keys and limits.
        for body, expected, part in (
            ({"prompt": "a", "loud": True}, 400, "loud is unknown"),
            ({"prompt": "a", "model": "other"}, 404, "allowed: demo"),
            ({"prompt": "fail"}, 400, "top_k is -7"),
            ({"prompt": "a" * 300}, 413, "longer than 200 bytes"),
        ):
            status, error = app.ask("POST", "/v1/shout", body, **KEY)
            assert (status, part in error["error"]["message"]) == (expected, True), error
        assert app.ask("POST", "/v1/shout", {"prompt": "a"})[0] == 401
        assert app.ask("GET", "/shout/volume") == (200, {"volume": 11})
        assert "/v1/shout" in app.ask("GET", "/openapi.json", **KEY)[1]["paths"]


def test_the_toy_is_no_part_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_app(tmp_path, monkeypatch, max_requests=0) as app:
        assert app.ask("POST", "/v1/shout", {"prompt": "a"})[0] == 404
    with scripted_app(tmp_path, monkeypatch, max_requests=0, families=(*FAMILIES, ROW)) as app:
        assert app.ask("POST", "/v1/shout", {"prompt": "a"})[0] == 429
