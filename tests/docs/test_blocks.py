"""Every code block of README.md and docs/ is run as it stands, or a comment in front of it says why it is not."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.docs.blocks import COMMANDS, ROOT, SHOWN, Block, all_blocks, named_files, planned_files

BLOCKS = all_blocks()


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_has_a_language_and_its_mark_is_whole(block: Block) -> None:
    assert block.language in (*COMMANDS, *SHOWN), "a fence with one of these languages; text for a drawing"
    if block.mark:
        assert block.language in COMMANDS
        assert bool(block.words) == (block.mark != "server"), "a mark needs its reason, packages or file"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark == "excerpt"], ids=lambda block: block.name)
def test_an_excerpt_stands_in_its_file(block: Block) -> None:
    assert block.code.strip() in (ROOT / block.words).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", of("json", "yaml"), ids=lambda block: block.name)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.code)
    else:
        list(yaml.safe_load_all(block.code))


FOREIGN = {"samples/client.py"}  # of another repository


def test_files_that_the_text_names_are_there() -> None:
    """By their whole path or the end of it, as `runner/start/memory.py`."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in (".venv", ".git", "build")]
    files = [path for folder in folders for path in folder.rglob("*.*")] + list(ROOT.glob("*.*"))
    endings = {"/".join(path.relative_to(ROOT).parts[-length:]) for path in files for length in range(1, 8)}
    missing = {name: page for name, page in named_files() if name not in endings | FOREIGN | planned_files()}
    assert missing == {}
