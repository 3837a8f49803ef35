"""What benchmarks.quality says of formats: small losses where they are small, of the fixed text's own numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.quality import agreement, measure
from benchmarks.quality_formats import GROUP, Calibration, gptq
from tests.parity.checkpoints import save_checkpoint
from tests.parity.int4_files import Numbers, Variant
from tests.parity.test_fp8_weights import tokens


def test_rows(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, intermediate_size=128)
    calibration = Calibration.of(tmp_path, sequences=2, length=24)
    rows = dict(measure(tmp_path, tokens(90, 1), ["fp8", "fp8-static", "gptq"], calibration=calibration))
    assert rows["float32"]["kl"] == 0
    assert rows["float32"]["best"] == 1
    assert 0 < rows["fp8"]["kl"] < rows["gptq"]["kl"]
    assert 0 < rows["fp8-static"]["kl"] < 1
    assert all(0 <= row["greedy"] <= 1 and row["perplexity"] > 1 for row in rows.values())


def test_greedy_agreement() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 0, 4], [5, 6, 7, 8]]) == 0.75


def test_gptq_loses_less_than_rounding() -> None:
    """Of inputs that go together, as activations do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 24, generator=generator) @ torch.randn(24, 128, generator=generator)
    weight = torch.randn(32, 128, generator=generator)
    variant = Variant(layout="gptq", group=GROUP)
    found, rounded = gptq(weight, x.t() @ x, GROUP), Numbers.of(weight, variant)
    losses = [((x @ (one.dequantized() - weight).t()) ** 2).mean().item() for one in (found, rounded)]
    assert losses[0] < 0.5 * losses[1]
