"""Every decoder type of transformers, by its default config: served or refused by name, never a traceback; and what is
said to be served runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.kernel_choices import kernel_choices
from tests.docs.blocks import ROOT
from tests.parity.decoder_types import small_config

CPU = DeviceFacts.cpu()


@pytest.fixture(scope="module")
def list_models() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("list_models", ROOT / "scripts" / "list_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where its dataclasses look
        spec.loader.exec_module(module)
        yield module


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


@pytest.mark.full
def test_what_is_said_to_run_natively_computes_a_step(list_models: ModuleType, tmp_path: Path) -> None:
    """The default config's sizes, on the meta device: every layer is built, and its shapes meet."""
    page = (Path(list_models.PAGE)).read_text(encoding="utf-8")
    table = page.split(list_models.BEGIN)[1].split(list_models.END)[0]
    natives = [line.split("|")[1].strip(" `") for line in table.splitlines() if f"| {list_models.NATIVE} |" in line]
    assert len(natives) > 50
    for model_type in natives:
        folder = tmp_path / model_type
        list_models.default_config(model_type).save_pretrained(folder)
        try:
            config = load_model_config(folder, "native")
        except ConfigError:  # its default config lacks something that every checkpoint's has
            small_config(model_type, architectures=[f"{model_type.capitalize()}ForCausalLM"]).save_pretrained(folder)
            config = load_model_config(folder, "native")
        assert kernel_choices(config, CPU, torch.float32, rows=(1, 2048)), model_type
