"""Runs the commands and programs of README.md and docs/ against the server that README.md starts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from tests.docs.blocks import ROOT, Block, all_blocks
from tests.docs.stack import Namespace, namespace, served

pytestmark = pytest.mark.e2e

BLOCKS = all_blocks()
# Each command once, however many pages begin with it.
SERVERS = list(
    {block.code.split("#")[0].strip(): block for block in reversed(BLOCKS) if block.mark == "server"}.values()
)[::-1]
COMMANDS = [block for block in BLOCKS if block.language == "bash" and not block.mark]
PROGRAMS = [block for block in BLOCKS if block.language == "python" and not block.mark]
WITH_PACKAGES = [block for block in BLOCKS if block.mark == "needs"]
PAGES = sorted({block.page for block in PROGRAMS})

# The programs of a page in their order, in one interpreter: later ones go on with the names of earlier ones. Empty
# lines in front of each make a traceback name the document's own line.
_RUN = """
import json, sys
names = {"__name__": "__main__"}
for page, line, code in json.load(open(sys.argv[1])):
    print(f"--- {page}:{line}", flush=True)
    exec(compile("\\n" * (line - 1) + code, page, "exec"), names)
"""


@dataclass(frozen=True)
class Stack:
    """A place whose default ports answer, and what its commands find in their environment."""

    place: Namespace
    environment: dict[str, str]
    folder: Path

    def run(self, *words: str) -> str:
        """What the command writes; it has to end well, without an error of the server's in it."""
        done = self.place.run(words, self.environment)
        assert done.returncode == 0, done.stdout[-3000:]
        assert not re.search(r'"error"\s*:', done.stdout), done.stdout[-3000:]
        return done.stdout

    def run_programs(self, blocks: list[Block], python: str = sys.executable) -> str:
        program = self.folder / f"{blocks[0].page.stem}-{blocks[0].line}.json"
        program.write_text(json.dumps([(str(b.page.relative_to(ROOT)), b.line, b.code) for b in blocks]))
        return self.run(python, "-c", _RUN, str(program))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Nobody serves yet."""
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(f"no tritonserver: {error}")
    folder = tmp_path_factory.mktemp("documents")
    (folder / ".curlrc").write_text("fail-with-body\n")  # a status of 400 or more ends a command as an error
    environment = {
        **os.environ,
        "CURL_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    with namespace() as place:
        yield Stack(place, environment, folder)


@pytest.fixture(scope="module")
def stack(bare: Stack) -> Iterator[Stack]:
    """With the server that README.md starts first."""
    with served(bare.place, SERVERS[0], bare.environment, bare.folder / "log"):
        yield bare


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.name)
def test_commands(stack: Stack, block: Block) -> None:
    stack.run("bash", "-euo", "pipefail", "-c", block.code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs(stack: Stack, page: Path) -> None:
    stack.run_programs([block for block in PROGRAMS if block.page == page])


@pytest.mark.parametrize("block", WITH_PACKAGES, ids=lambda block: block.name)
def test_programs_with_packages(stack: Stack, frameworks_python: str, block: Block) -> None:
    stack.run_programs([block], frameworks_python)


# Last: they need the ports that `stack` has until then, so in namespaces of their own.
@pytest.mark.parametrize("block", SERVERS[1:], ids=lambda block: block.name)
def test_servers(bare: Stack, block: Block) -> None:
    with (
        namespace() as place,
        served(place, block, bare.environment, bare.folder / f"log-{block.page.stem}-{block.line}"),
    ):
        pass
