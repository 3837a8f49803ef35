"""No "auto" is left, and what cannot work is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.model_shapes import SHAPES
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels import device_facts
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start.device import MachineFacts, free_bytes
from minisgl_backend.runner.start.resolve import RECORDED_MAX_BS, resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.tensor_parallel import device_of_rank

CPU = MachineFacts(kind="cpu", name="CPU", capability=None, count=1, multiprocessors=0, bfloat16=lambda: False)
BFLOAT16_CPU = dataclasses.replace(CPU, bfloat16=lambda: True)
AVX2_CPU = dataclasses.replace(BFLOAT16_CPU, bfloat16_units=False)
HOPPER = MachineFacts(kind="cuda", name="H200", capability=(9, 0), count=4, multiprocessors=132, bfloat16=lambda: True)
ADA = dataclasses.replace(HOPPER, name="L4", capability=(8, 9), count=1, multiprocessors=58)
TURING = dataclasses.replace(HOPPER, name="T4", capability=(7, 5), count=1, multiprocessors=40, bfloat16=lambda: False)
ENVIRONMENT = Environment(overlap=True, log_level="INFO", flashinfer_tensor_cores=None)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1000,
    "torch_dtype": "bfloat16",
}


def test_each_engine_core_has_devices_of_its_own() -> None:
    model = ModelConfig.from_dicts(MODEL, {})
    config = EngineConfig(dp=2, tp=2)
    for dp_rank, first in ((0, 0), (1, 2)):
        runtime = resolve(
            config, "folder", model, HOPPER, ENVIRONMENT, why_missing=lambda package: None, dp_rank=dp_rank
        )
        devices = [device_of_rank(runtime.device, runtime.first_device + rank) for rank in range(2)]
        assert devices == [torch.device("cuda", first), torch.device("cuda", first + 1)]
    assert resolved(CPU, dp=8, tp=2).device == "cpu", "where processors are shared there is no limit"


def test_each_node_has_devices_of_its_own() -> None:
    over_two = {"tp": 8, "nodes": 2, "rendezvous": "node0:29600"}
    runtime = resolved(HOPPER, **over_two)
    assert [runtime.device_index(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"tp is 8; allowed: 1 to 4, the number of GPUs .* on 2 nodes"):
        resolved(dataclasses.replace(HOPPER, count=2), **over_two)


def test_nodes_may_differ_in_where_things_are_alone() -> None:
    runtime = resolved(HOPPER)
    elsewhere = dataclasses.replace(runtime, model_dir="/another", first_device=4)
    assert runtime.shared() == elsewhere.shared()
    assert runtime.shared() != dataclasses.replace(runtime, page_size=2 * runtime.page_size).shared()


def resolved(
    device: MachineFacts, saved: str = "bfloat16", shape: Mapping[str, Any] = MappingProxyType({}), **options: object
) -> RuntimeConfig:
    model = ModelConfig.from_dicts({**MODEL, "torch_dtype": saved, **shape}, {})
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return resolve(config, "folder", model, device, ENVIRONMENT, why_missing=lambda package: None)


@pytest.mark.parametrize(
    ("device", "saved", "requested", "expected"),
    [
        (CPU, "bfloat16", "auto", "float32"),
        (CPU, "float16", "auto", "float32"),
        (CPU, "float32", "bfloat16", "bfloat16"),
        (BFLOAT16_CPU, "bfloat16", "auto", "bfloat16"),
        (BFLOAT16_CPU, "float16", "auto", "float16"),
        (AVX2_CPU, "bfloat16", "auto", "bfloat16"),
        (AVX2_CPU, "float16", "auto", "float16"),
        (AVX2_CPU, "float32", "auto", "float32"),
        (BFLOAT16_CPU, "bfloat16", "float32", "float32"),
        (HOPPER, "bfloat16", "auto", "bfloat16"),
        (HOPPER, "float16", "auto", "float16"),
        (HOPPER, "float32", "auto", "float16"),
        (HOPPER, "bfloat16", "float32", "float32"),
        (TURING, "bfloat16", "auto", "float16"),
    ],
)
def test_dtype(device: MachineFacts, saved: str, requested: str, expected: str) -> None:
    assert resolved(device, saved, dtype=requested).dtype == expected


@pytest.mark.parametrize(
    ("device", "requested", "expected"),
    [
        (HOPPER, "auto", "bfloat16"),
        (HOPPER, "bf16", "bfloat16"),
        (HOPPER, "fp8_e4m3", "float8_e4m3fn"),
        (CPU, "auto", "float32"),
        (CPU, "fp8_e4m3", "float8_e4m3fn"),
        (CPU, "float16", "float16"),
    ],
)
def test_the_format_of_the_cache(device: MachineFacts, requested: str, expected: str) -> None:
    assert resolved(device, kv_cache_dtype=requested).kv_dtype == expected


def test_on_a_cpu() -> None:
    runtime = resolved(CPU)
    assert (runtime.device, runtime.prefill_backend, runtime.decode_backend) == ("cpu", "torch", "torch")
    assert runtime.cuda_graph_max_bs == RECORDED_MAX_BS
    assert resolved(CPU, cuda_graph_max_bs=0).cuda_graph_max_bs == 0
    assert resolved(CPU, cuda_graph_max_bs=100).cuda_graph_max_bs == RECORDED_MAX_BS
    assert runtime.max_seq_len == 1000


def test_on_a_gpu() -> None:
    runtime = resolved(HOPPER, max_seq_len_override=500, max_running_requests=8, cuda_graph_max_bs=64, tp=4)
    assert runtime.device == "cuda"
    assert runtime.prefill_backend != "torch"
    assert runtime.cuda_graph_max_bs == 8
    assert runtime.max_seq_len == 500
    assert resolved(HOPPER).cuda_graph_max_bs is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8192),
        ({"cuda_graph_max_bs": 8}, 8192),
        ({"cuda_graph_max_bs": 0}, 0),
        ({"cuda_graph_max_bs": 0, "cuda_graph_max_tokens": 64}, 64),
        ({"cuda_graph_max_tokens": 0}, 0),
        ({"tp": 4}, 8192),
        ({"tp": 4, "cuda_graph_max_tokens": 512}, 512),
        ({"max_prefill_length": 100, "max_running_requests": 8}, 108),
    ],
)
def test_graphs_of_steps_with_prompt_tokens(options: dict[str, Any], expected: int) -> None:
    assert resolved(HOPPER, **options).cuda_graph_max_tokens == expected
    assert resolved(CPU, **{**options, "tp": 1}).cuda_graph_max_tokens == 0


QWEN3_30B_A3B = SHAPES["qwen3-30b-a3b"]
QWEN3_235B_A22B = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}


@pytest.mark.parametrize(
    ("shape", "device", "options", "expected"),
    [
        (QWEN3_30B_A3B, HOPPER, {}, 16384),
        (QWEN3_30B_A3B, HOPPER, {"max_prefill_length": 2048}, 2048),
        (QWEN3_30B_A3B, ADA, {}, 8192),
        (QWEN3_30B_A3B, CPU, {}, 8192),
        ({**QWEN3_30B_A3B, **QWEN3_235B_A22B}, HOPPER, {"tp": 4}, 8192),
        ({}, HOPPER, {}, 8192),
    ],
)
def test_a_mixture_that_computes_them_soon_has_longer_steps(
    shape: dict[str, Any], device: MachineFacts, options: dict[str, Any], expected: int
) -> None:
    assert resolved(device, shape=shape, **options).max_prefill_length == expected


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "device", "tp", "expected"),
    [
        (1024, 3072, 28, HOPPER, 1, 8192),  # Qwen3-0.6B
        (1024, 3072, 28, ADA, 1, 3072),
        (2048, 6144, 28, HOPPER, 1, 2048),  # 1.7B
        (2048, 6144, 28, HOPPER, 2, 5120),
        (4096, 12288, 36, HOPPER, 1, 2048),  # 8B
        (8, 16, 2, HOPPER, 1, 8192),
    ],
)
def test_a_small_model_has_longer_steps_captured(
    hidden: int, intermediate: int, layers: int, device: MachineFacts, tp: int, expected: int
) -> None:
    """Of which the host's launches take longer than the device's work."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    assert resolved(device, shape={**sizes, **heads}, tp=tp).cuda_graph_max_tokens == expected


@pytest.mark.parametrize("device", [HOPPER, ADA, TURING])
def test_facts_of_a_gpu(device: MachineFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.capability is not None
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name, major=major, minor=minor, multi_processor_count=device.multiprocessors
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: device.count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device_facts._of_gpu.cache_clear()
    try:
        found = MachineFacts.detect()
    finally:
        device_facts._of_gpu.cache_clear()
    assert found.bfloat16() == device.bfloat16()
    for fact in ("kind", "name", "capability", "count", "multiprocessors", "compute_capability"):
        assert getattr(found, fact) == getattr(device, fact)
    assert found.dependent_launch == (found.capability == (9, 0))
    assert found.shared_memory == {(7, 5): 64 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}[found.capability]


def test_a_mixture_counts_the_experts_of_a_token() -> None:
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    attention = 2 * (8 + 4) * 16
    weights = ModelConfig.from_dicts({**MODEL, **mixture}, {}).layer_weights_per_token
    assert weights == 64 * (2 * attention + 3 * 96 + 3 * 3 * 32 + 16)
    assert ModelConfig.from_dicts(MODEL, {}).layer_weights_per_token == 64 * 2 * (attention + 3 * 96)


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        (TURING, {"dtype": "bfloat16"}, ("dtype", "bfloat16", "T4", "float16")),
        (HOPPER, {"max_seq_len_override": 1001}, ("max_seq_len_override", "1001", "1000")),
        (HOPPER, {"tp": 3}, ("tp", "3", "num_attention_heads")),
        (TURING, {"tp": 2}, ("tp", "2", "1 to 1")),
        (HOPPER, {"dp": 3, "tp": 2}, ("dp is 3", "tp 2: 1 to 2", "sees 4")),
        (HOPPER, {"dp": 5}, ("dp is 5", "1 to 4")),
        (CPU, {"attention_backend": "fi"}, ("attention_backend", "fi", "torch")),
        (HOPPER, {"attention_backend": "fi"}, ("attention_backend", "fi", "64, 128, 256", "16")),
        (CPU, {"num_pages": 2**27, "page_size": 16}, ("num_pages", str(2**27), str(2**27 - 2), "16 tokens")),
    ],
)
def test_refusals_name_option_value_and_limit(
    device: MachineFacts, options: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(device, **options)
    for word in words:
        assert word in str(caught.value)


def test_this_machine_has_facts() -> None:
    facts = MachineFacts.detect()
    assert facts.kind in ("cpu", "cuda")
    assert free_bytes(torch.device(facts.kind)) > 0


def test_a_triton_too_old_for_the_kernels_is_refused_by_name() -> None:
    """It ended in a traceback of its compiler."""
    with pytest.raises(ConfigError, match=r"triton is 3\.4\.0; needed on a GPU: 3\.5 or newer.*torch>=2\.9"):
        resolved(dataclasses.replace(HOPPER, triton="3.4.0"))
    for version in ("3.5.0", "3.10.0+git1234", "4.0.0"):
        assert resolved(dataclasses.replace(HOPPER, triton=version)).device == "cuda"


def test_scales_of_a_cache_count_where_it_has_scales(caplog: pytest.LogCaptureFixture) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    with caplog.at_level("WARNING"):
        assert resolved(CPU, shape={"quantization_config": said}).kv_dtype == "float32"
    assert caplog.text.count("scales of a quantized KV cache are left out, since the cache is float32") == 1
    refused = r"kv_cache_dtype is 'fp8_e4m3', and .*kv_cache_scheme is .*attn_head.*allowed: with an FP8 cache: 8 bits"
    with pytest.raises(ConfigError, match=refused):
        resolved(CPU, shape={"quantization_config": said}, kv_cache_dtype="fp8_e4m3")
    said["kv_cache_scheme"] = {**scheme, "strategy": "tensor"}
    assert resolved(CPU, shape={"quantization_config": said}, kv_cache_dtype="fp8_e4m3").kv_dtype == "float8_e4m3fn"
