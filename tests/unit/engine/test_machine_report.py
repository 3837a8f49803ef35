"""What the engine says of a machine: this one, and made-up GPUs with the packages that are installed here."""

from __future__ import annotations

import json
import py_compile
import sys
from pathlib import Path

import pytest
import torch

from minisgl_backend.attention.needs import AttentionNeeds
from minisgl_backend.attention.registry import choose_attention, preferences
from minisgl_backend.config import BACKENDS, EngineConfig
from minisgl_backend.engine.build import resolve_options
from minisgl_backend.engine.machine_report import report
from minisgl_backend.environment import Environment
from minisgl_backend.host import doctor
from minisgl_backend.runner.start import device as device_module
from minisgl_backend.runner.start.device import MachineFacts


def test_it_is_what_the_engine_would_take() -> None:
    found = report()
    runtime, _ = resolve_options(EngineConfig(), Environment.read())
    assert (found["demo"]["dtype"], found["demo"]["page_size"]) == (runtime.dtype, runtime.page_size)
    assert found["device"]["kind"] == runtime.device
    assert set(found["attention"]["backends"]) == set(BACKENDS)
    json.dumps(found)


def test_whether_python_keeps_torch_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert report()["torch"]["bytecode"] is False
    assert py_compile.compile(torch.__file__, doraise=True)
    assert report()["torch"]["bytecode"] is True


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_a_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = MachineFacts(
        kind="cuda",
        name="GPU",
        capability=capability,
        count=2,
        multiprocessors=132,
        bfloat16=lambda: capability >= (8, 0),
    )
    monkeypatch.setattr(MachineFacts, "detect", classmethod(lambda cls: facts))
    monkeypatch.setattr(device_module, "free_bytes", lambda device: 79 << 30)
    found = report()
    assert "broken" not in found
    attention = found["attention"]
    dtype = "bfloat16" if facts.bfloat16() else "float16"
    needs = AttentionNeeds(compute_capability=facts.compute_capability, dtype=dtype)
    chosen = choose_attention("auto", None, needs)
    assert (attention["prefill"], attention["decode"]) == (chosen.prefill, chosen.decode)
    assert list(attention["warnings"]) == list(chosen.warnings)
    assert len(attention["tried"]) == len(preferences(needs))
    assert attention["backends"][chosen.decode] is None
    assert not any(text.startswith("attention_backend is") for text in attention["backends"].values() if text)
    found["torch"]["cuda"] = "12.8"  # the one here may be built for the CPU
    said = {finding.name: finding for finding in doctor._engine(json.loads(json.dumps(found)), True)}
    assert said["torch"].state == doctor.OK
    assert said["auto"].state == (doctor.NOTE if chosen.warnings else doctor.OK)


def test_a_wrong_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "LOUD")
    found = report()
    assert "LOG_LEVEL is 'LOUD'" in found["refusal"]
    assert "device" in found


def test_a_broken_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cls: type[MachineFacts]) -> MachineFacts:
        raise OSError("libcudart.so.13:\n cannot open")

    monkeypatch.setattr(MachineFacts, "detect", classmethod(broken))
    found = report()
    assert found["broken"] == "OSError: libcudart.so.13: cannot open"
    assert set(found) == {"idle_cpus", "broken"}
