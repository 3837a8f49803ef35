"""Which pages in browsers may send requests, and which names the endpoint answers to."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from minisgl_backend.host.addresses import is_loopback
from minisgl_backend.openai.browsers import BrowserGuard

OWN = "127.0.0.1:9000"


def client(host: str = "127.0.0.1", hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> TestClient:
    routes = [Route("/", lambda request: PlainTextResponse("in"), methods=["GET", "POST", "DELETE"])]
    app = Starlette(routes=routes)
    app.add_middleware(BrowserGuard, host=host, allowed_hosts=hosts, allowed_origins=origins)
    return TestClient(app)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 200, id="a program"),
        pytest.param({"origin": f"http://{OWN}", "sec-fetch-site": "same-origin"}, 200, id="the own page"),
        pytest.param({"origin": f"http://{OWN}"}, 200, id="the own page, an old browser"),
        pytest.param({"origin": f"https://{OWN}"}, 200, id="behind TLS that a proxy ends"),
        pytest.param({"sec-fetch-site": "none"}, 200, id="typed"),
        pytest.param({"origin": "https://chat.example", "sec-fetch-site": "same-origin"}, 200, id="a proxy's name"),
        pytest.param({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403, id="another site"),
        pytest.param({"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"}, 403, id="another port"),
        pytest.param({"origin": "http://127.0.0.1:3000"}, 403, id="another port, an old browser"),
        pytest.param({"origin": "null"}, 403, id="a sandboxed frame"),
        pytest.param({"sec-fetch-site": "cross-site"}, 403, id="no origin told"),
        pytest.param({"origin": f"http://{OWN}", "sec-fetch-site": "cross-site"}, 403, id="an origin that lies"),
        pytest.param({"origin": "http://["}, 403, id="no origin at all"),
    ],
)
def test_what_changes_something_comes_from_the_own_page(headers: dict[str, str], status: int) -> None:
    for method in ("POST", "DELETE"):
        response = client().request(method, "/", headers={"host": OWN, **headers})
        assert response.status_code == status
        if status == 403:
            assert response.json()["error"]["code"] == "origin_not_allowed"
            assert "--allowed-origins" in response.json()["error"]["message"]
    assert client().get("/", headers={"host": OWN, **headers}).status_code == 200


def test_allowed_origins_pass() -> None:
    headers = {"host": OWN, "origin": "https://App.example", "sec-fetch-site": "cross-site"}
    for origins, status in ((("https://app.example/",), 200), (("*",), 200), (("https://other.example",), 403)):
        assert client(origins=origins).post("/", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[
            (name, 200)
            for name in ("127.0.0.1:9000", "127.0.0.1", "localhost:1", "LOCALHOST.", "[::1]:9000", "127.5.5.5")
        ],
        *[(name, 200) for name in ("app.localhost:9000", "proxy.example", "Proxy.Example:443")],
        *[
            (name, 403)
            for name in ("evil.example", "127.0.0.1.evil.example:9000", "localhost.evil.example", "10.0.0.1")
        ],
        *[(name, 403) for name in ("[::2]:9000", "[", "user@127.0.0.1@evil.example", "")],
    ],
)
def test_names_on_a_loopback_address(host: str, status: int) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        response = client(hosts=("proxy.example",)).request(method, "/", headers={"host": host})
        assert (response.status_code == 403) == (status == 403)
    assert client(hosts=("*",)).get("/", headers={"host": host}).status_code == 200


def test_names_elsewhere_are_free_unless_some_are_named() -> None:
    for listening in ("0.0.0.0", "::", "10.0.0.1"):
        assert client(listening).get("/", headers={"host": "anything.example"}).status_code == 200
        assert client(listening, ("a.example",)).get("/", headers={"host": "b.example"}).status_code == 403
        assert client(listening, ("a.example",)).get("/", headers={"host": "a.example:9000"}).status_code == 200


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost", "Localhost.")))
    assert not any(
        map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "notlocalhost", "localhost.example", "1.0.0.127"))
    )
