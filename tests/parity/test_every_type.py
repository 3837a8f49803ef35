"""Every decoder type of transformers, by its default config: served or refused by name, never a traceback; and what is
said to be served runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def list_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_models", ROOT / "scripts" / "list_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_table_of_models_is_up_to_date(list_models: ModuleType) -> None:
    text = list_models.PAGE.read_text(encoding="utf-8")
    assert list_models.page(text, list_models.all_rows()) == text, "python scripts/list_models.py writes it"


@pytest.mark.full
def test_what_is_said_to_run_through_transformers_is_compared(list_models: ModuleType) -> None:
    """Wrappers of a text model count by that: its class and config run."""
    page = (Path(list_models.PAGE)).read_text(encoding="utf-8")
    table = page.split(list_models.BEGIN)[1].split(list_models.END)[0]
    rows = [line.split("|") for line in table.splitlines() if f"| {list_models.FALLBACK} |" in line]
    missing = {
        config.get_text_config().model_type
        for row in rows
        if (config := list_models.default_config(row[1].strip(" `"))) is not None
    } - set(list_models.SERVED)
    assert missing <= list_models.NOT_COMPARED
