"""What pip is told, scripts/setup.sh tells uv, or leaves to pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.pip_settings import NoCounterpart, as_uv, read_settings

ROOT = Path(__file__).resolve().parents[2]


def test_settings_of_files_and_variables_are_handed_on() -> None:
    listed = "\n".join(
        [
            ":env:.find-links='/wheels'",
            ":env:.disable-pip-version-check='1'",
            "download.index-url='https://other/simple'",
            "global.extra-index-url='https://one/simple\\nhttps://two/simple'",
            "global.find-links='/nowhere'",
            "global.index-url='https://mirror/simple'",
            "global.no-index='false'",
            "install.index-url='https://nearer/simple'",
            "install.no-compile='yes'",
            "global.constraint='a.txt b.txt'",
        ]
    )
    found = as_uv(read_settings(listed))
    assert {name: value for name, value in found.items() if name not in as_uv({})} == {
        "UV_FIND_LINKS": "/wheels",
        "UV_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "UV_DEFAULT_INDEX": "https://nearer/simple",
        "UV_CONSTRAINT": "a.txt b.txt",
    }


@pytest.mark.parametrize("setting", ["no-index", "only-binary", "target", "user", "client-cert", "require-hashes"])
def test_what_uv_cannot_be_told_is_left_to_pip(setting: str) -> None:
    with pytest.raises(NoCounterpart, match=setting):
        as_uv({setting: "1"})


def test_the_script_reads_what_pip_reads(tmp_path: Path) -> None:
    """PIP_CONFIG_FILE comes last of pip's files, a variable after all of them."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://a.b/simple\nfind-links = /one\n  /two words\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_TRUSTED_HOST": "a.b c.d"}
    command = [sys.executable, str(ROOT / "scripts" / "pip_settings.py"), sys.executable]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "export UV_DEFAULT_INDEX=https://a.b/simple\n" in done.stdout
    assert "export UV_INSECURE_HOST='a.b c.d'\n" in done.stdout
    assert "export UV_INDEX_STRATEGY=unsafe-best-match\n" in done.stdout
    environment["PIP_NO_INDEX"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "uv has no no-index\n")
