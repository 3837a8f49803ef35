"""4-bit checkpoints in float32 against transformers with the dequantized weights: logits within 1e-3 of the largest.

Their writer is checked by the readers of others: compressed-tensors' own, and its converter of AWQ.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.experts.int4 import Int4ExpertsMethod
from minisgl_backend.weights.int4 import Int4LinearMethod
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.int4_files import VARIANTS, Numbers, stored, write_int4
from tests.parity.paged import PagedModel
from tests.parity.test_fp8_weights import tokens
from tests.unit.layers.ranks import on_ranks

# Tied and cut; biases; q and k in another order; experts; tensors that are stored together. With the linear layers
# and experts in 4 bits.
CASES = [
    ("qwen3-tied-sharded", "awq", 12),
    ("ernie4_5", "awq-partly", 10),
    ("qwen3_moe", "awq", 9),
    ("llama-bias-mha", "gptq", 12),
    ("phi3", "gptq-zeros-dynamic", 9),
    ("qwen3-tied-sharded", "gptq_v2-channel", 12),
    ("llama-bias-mha", "gptq-act-order", 12),
    ("qwen3_moe", "ct", 7),
    ("deepseek_v3", "awq", 17),
    ("mixtral", "ct-channel", 9),
    ("ernie4_5", "ct-zeros", 12),
    ("phi3", "ct-act-order", 12),
]


@pytest.mark.parametrize(("name", "variant", "count"), CASES)
def test_logits(name: str, variant: str, count: int, tmp_path: Path) -> None:
    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint(name, source)
    write_int4(source, variant, quantized, plain)
    prompt = tokens(40, 1)
    with torch.inference_mode():
        expected = reference_model(plain)(torch.tensor([prompt])).logits[0].float()

    def check(logits: torch.Tensor) -> None:
        assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()

    paged = PagedModel(quantized, page_size=16)
    methods = [one for one in paged.model.modules() if isinstance(one, (Int4LinearMethod, Int4ExpertsMethod))]
    assert len(methods) == count
    check(paged.step({0: prompt}, {})[0])

    def work(tp: TensorParallel) -> torch.Tensor:
        return PagedModel(quantized, page_size=16, tp=tp).step({0: prompt}, {})[0]

    if VARIANTS[variant].act_order:
        with pytest.raises(ConfigError, match=r"desc_act is true, and .*_proj has its inputs in an order of its own"):
            on_ranks(2, work)
        return
    for logits in on_ranks(2, work):
        check(logits)


def test_the_writer() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    for name in ("gptq", "gptq-zeros-dynamic", "gptq_v2-channel", "gptq-act-order"):
        numbers, files = Numbers.of(weight, VARIANTS[name]), stored(Numbers.of(weight, VARIANTS[name]), VARIANTS[name])
        assert (weight - numbers.dequantized()).abs().max() < 0.6 * numbers.scales.max()
        for out, into in ((0, 0), (47, 63), (5, 30)):  # as AutoGPTQ's QuantLinear computes it
            group = int(files["g_idx"][into])
            number = int(files["qweight"][into // 8, out]) >> 4 * (into % 8) & 15
            zero = (int(files["qzeros"][group, out // 8]) >> 4 * (out % 8) & 15) + (0 if "v2" in name else 1)
            assert (number - zero) * files["scales"][group, out].float() == numbers.dequantized()[out, into]


def test_the_writer_by_the_readers_of_others() -> None:
    others = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    for name in ("ct", "ct-zeros", "ct-act-order"):
        numbers = Numbers.of(weight, VARIANTS[name])
        files = stored(numbers, VARIANTS[name])
        found = others.unpack_from_int32(files["weight_packed"], 4, weight.shape).int() + 8
        assert torch.equal(found, numbers.numbers.int())
        if "weight_zero_point" in files:
            zeros = others.unpack_from_int32(files["weight_zero_point"], 4, numbers.zeros.shape, packed_dim=0)
            assert torch.equal(zeros.int() + 8, numbers.zeros.int())
    numbers = Numbers.of(weight, VARIANTS["awq"])
    files = {f"one.{suffix}": tensor.contiguous() for suffix, tensor in stored(numbers, VARIANTS["awq"]).items()}
    converted = AutoAWQConverter(group_size=32).process(files)
    as_others = stored(numbers, VARIANTS["ct-zeros"])
    for suffix in ("weight_packed", "weight_scale", "weight_zero_point"):
        assert torch.equal(converted[f"one.{suffix}"], as_others[suffix])
