"""What of benchmarks.formats can be tested without a GPU: its rows, its floors, what they are compared with, and that
published libraries are hidden where it says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.formats import ROWS, bases, floors, name_of, runs, shares, speedups
from benchmarks.hidden_libraries import LIBRARIES, hide_libraries
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES
from minisgl_backend.attention import flash_attn_trial
from minisgl_backend.attention.latent import flashmla
from minisgl_backend.attention.registry import KINDS, import_failure
from minisgl_backend.config import EngineConfig
from minisgl_backend.models.config import ModelConfig

CARD = Limits(bytes_per_s=3.1e12, flop_per_s=700e12)


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_options_that_there_are_a_base_before_them_and_floors(name: str) -> None:
    row = ROWS[name]
    EngineConfig(model="folder", **{"dummy_weights": True, **row.options})
    assert row.base is None or list(ROWS).index(row.base) < list(ROWS).index(name)
    config: dict[str, Any] = {key: value for key, value in SHAPES[row.model].items() if key != "quantization_config"}
    found = floors(row, ModelConfig.from_dicts(config, {}), CARD)
    assert len(found) == len(row.decode) + row.prefill + row.offline
    assert all(0 < value < 100 for figure, value in found.items() if figure.endswith("_ms"))
    if row.base is not None:  # it is compared by every figure that it has
        base = ROWS[row.base]
        assert row.prefill <= base.prefill
        assert row.offline <= base.offline
        assert set(row.decode) <= set(base.decode)


def test_a_long_context_has_a_floor_of_its_own() -> None:
    lite = ROWS["deepseek-v2-lite"]
    found = floors(lite, ModelConfig.from_dicts(SHAPES[lite.model], {}), CARD)
    assert found.keys() == {"bs1_ms", "bs8_ms", "bs64_ms", "bs64_16000_ms", "prefill_tok_s"}
    latents = 64 * (16_000 - 1024) * 27 * 576 * 2  # bytes that are read more
    assert found["bs64_16000_ms"] - found["bs64_ms"] == pytest.approx(1000 * latents / CARD.bytes_per_s, rel=0.01)


def test_without_libraries_a_row_is_compared_with_itself_or_with_its_base() -> None:
    assert runs(["q14", "q14-fp8"], "with") == [("q14", False, 1), ("q14-fp8", False, 1)]
    assert runs(["q14", "q06"], "both") == [("q14", False, 1), ("q14", True, 1), ("q06", False, 1), ("q06", True, 1)]
    assert bases("q14", False) == []
    assert bases("q14-fp8", False) == ["q14"]
    assert bases("q14", True) == ["q14"]
    assert bases("q14-fp8", True) == ["q14-fp8", "q14-alone"]
    with pytest.raises(SystemExit, match="--only has q15; allowed: q14, "):
        runs(["q14", "q15"], "with")


def test_on_several_gpus_a_row_is_compared_with_itself_on_one() -> None:
    found = runs(["q30-blocks"], "with", (1, 4))
    assert [name_of(*one) for one in found] == ["q30-blocks", "q30-blocks-tp4"]
    assert [bases(*one) for one in found] == [["q30"], ["q30-blocks"]]
    assert name_of("q06", True, 4) == "q06-alone-tp4"
    assert bases("q06", True, 4) == ["q06-alone"]
    row, config = ROWS["q32"], ModelConfig.from_dicts(SHAPES["qwen3-32b"], {})
    assert floors(row, config, CARD.times(4))["bs8_ms"] == pytest.approx(
        floors(row, config, CARD)["bs8_ms"] / 4, rel=0.01
    )


def test_hidden_libraries_are_as_if_they_were_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {entry.library.package for kind in KINDS.values() for entry in kind.backends.values()} - {
        None,
        "triton",
    } <= set(LIBRARIES)
    for name in LIBRARIES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "flash_attn.py").write_text("def is_fa3_supported(): return True")
    monkeypatch.syspath_prepend(str(tmp_path))
    with mock.patch.dict(sys.modules):
        assert import_failure("sgl_kernel.flash_attn") is None
        with pytest.raises(RuntimeError, match="imported already, and so not to be hidden: sgl_kernel"):
            hide_libraries()
        del sys.modules["sgl_kernel"], sys.modules["sgl_kernel.flash_attn"]
        hide_libraries()
        assert [name for name in LIBRARIES if importlib.util.find_spec(name) is not None] == []
        for name in ("sgl_kernel", "flashinfer", f"{flash_attn_trial.__name__}:answers"):
            assert "ModuleNotFoundError" in (import_failure(name) or "")
        assert "flash_mla" in (import_failure(f"{flashmla.__name__}:answers") or "")


def test_ratios_of_formats_are_speeds() -> None:
    base = {"engine": "one", "bs1_ms": 10.0, "offline_tok_s": 100.0, "pages": 5}
    found = {"engine": "other", "bs1_ms": 5.0, "offline_tok_s": 150.0}
    assert speedups(found, base) == {"bs1_ms": 2.0, "offline_tok_s": 1.5}
    assert shares({"bs1_ms": 10.0, "floor_bs1_ms": 6.0, "bs8_ms": 1.0}) == {"bs1_ms": 0.6}
