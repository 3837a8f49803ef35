"""URLs of images before a whole endpoint, in a network namespace where every address, public or not, is this machine's:
what each is answered, and that nothing but the public address was ever connected to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.images.inside import PUBLIC

BLOCKED, FAILED, TOO_LARGE = "invalid_image_url", "image_fetch_failed", "image_file_too_large"
ANSWERS: list[tuple[str, str | None]] = [
    *((f"http://open.test/{page}", None) for page in ("a.png", "a.png?b=%20c", "there", "lies")),
    *((f"http://{PUBLIC}/a.png", None), ("http://bücher.test/a.png", None), ("HTTP://OPEN.test.:80/a.png", None)),
    ("https://open.test/a.png", None),
    *(
        (f"http://{host}/a.png", BLOCKED)
        for host in ("127.0.0.1", "[::1]", "[::ffff:10.0.0.1]", "0x7f.1", "2130706433")
    ),
    *((f"http://{host}/a.png", BLOCKED) for host in ("169.254.169.254", "localhost", "localhost.", "10.0.0.1", "0")),
    *((f"http://{host}/a.png", BLOCKED) for host in ("both.test", "inside.test", "nowhere.test")),
    *(("http://rebind.test/a.png", None), ("http://rebind.test/a.png", BLOCKED)),
    *((f"http://open.test/{page}", BLOCKED) for page in ("private", "metadata", "inside", "file")),
    *(("http://open.test/loop", FAILED), ("https://open.test/down", BLOCKED)),
    *(("http://open.test:22/a.png", BLOCKED), ("http://me:word@open.test/a.png", BLOCKED)),
    *(("http://open.test/a\r\nX: y", BLOCKED), ("gopher://open.test/a", BLOCKED), ("file:///etc/passwd", BLOCKED)),
    ("https://both.test/a.png", BLOCKED),
    *(("http://open.test/slow", FAILED), ("http://open.test/short", FAILED), ("http://open.test/gzip", FAILED)),
    *((f"http://open.test/{page}", TOO_LARGE) for page in ("endless", "large")),
    *((f"http://open.test/{status}", FAILED) for status in (403, 404, 429, 500, 204)),
]
INSIDE = f"""
set -e
mount --bind "$1/resolv.conf" /etc/resolv.conf
ip link set lo up
for one in {PUBLIC} 10.0.0.1 169.254.169.254; do ip addr add $one/32 dev lo; done
exec "$2" -m tests.images.inside "$1/certificate.pem" "$1/key.pem"
"""


def test_what_each_url_is_answered(tmp_path: Path) -> None:
    if any(shutil.which(tool) is None for tool in ("unshare", "ip", "openssl")):
        pytest.skip("needs unshare, ip and openssl")
    if subprocess.run(["unshare", "-rnm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", tmp_path / "key.pem"]
    name = ["-subj", "/CN=open.test", "-addext", "subjectAltName=DNS:open.test"]
    command = ["openssl", "req", "-x509", "-days", "2", *key, *name, "-out", tmp_path / "certificate.pem"]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(
        ["unshare", "-rnm", "bash", "-c", INSIDE, "inside", tmp_path, sys.executable],
        input=json.dumps([url for url, _ in ANSWERS]),
        env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "certificate.pem")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, reached = json.loads(done.stdout.splitlines()[-1])
    assert [(url, status, code) for url, status, code in found] == [
        (url, 200 if code is None else 400, code) for url, code in ANSWERS
    ]
    assert reached == [PUBLIC]
