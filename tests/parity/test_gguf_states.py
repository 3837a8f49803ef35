"""GGUF files of models with states, in the layout of llama.cpp's converter: logits are those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.select import block_types
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.weights.gguf import BlockLinearMethod
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.tiny_gguf import add

TOKENS = [3 + 7 * i % 310 for i in range(90)]
Tensors = dict[str, np.ndarray]

_LFM2 = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}


def lfm2(config: Any, stored: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Keys and tensors of a file, from config and tensors of a checkpoint."""
    is_moe = config.model_type == "lfm2_moe"
    found: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in stored.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
            continue
        _, _, layer, local = name.split(".", 3)
        if local == "feed_forward.expert_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = tensor
        elif ".experts." in local:
            _, _, _, kind, _ = local.split(".")
            full = f"blk.{layer}.{_LFM2[f'feed_forward.{kind}']}_exps.weight"
            experts.setdefault(full, []).append(tensor)
        else:
            module, _, suffix = local.rpartition(".")
            found[f"blk.{layer}.{_LFM2[module]}.{suffix}"] = tensor.squeeze(1) if module == "conv.conv" else tensor
    inner = next(one.shape[0] for name, one in found.items() if name.endswith("ffn_gate.weight"))
    keys = {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache, "feed_forward_length": inner, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }  # fmt: skip
    if is_moe:
        keys |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2,
            "leading_dense_block_count": config.num_dense_layers,
        }  # fmt: skip
    return keys, found | {name: np.stack(values) for name, values in experts.items()}


_DELTA = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _taking_turns(x: np.ndarray, axis: int, config: Any, size: int) -> np.ndarray:
    """Value heads of `size` in the converter's order."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    shape = x.shape
    heads = x.reshape(*shape[:axis], keys, values // keys, size, *shape[axis + 1 :])
    return np.ascontiguousarray(heads.swapaxes(axis, axis + 1)).reshape(shape)


def delta(config: Any, stored: Tensors) -> tuple[dict[str, Any], Tensors]:
    """As `lfm2`."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    k_dim, v_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, is_next = 2 * num_keys * k_dim, config.model_type == "qwen3_next"
    found: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}

    def tiled(name: str, x: np.ndarray) -> np.ndarray:
        if is_next:
            return x
        if name in ("in_proj_qkv", "conv1d"):
            return np.concatenate([x[:keys], _taking_turns(x[keys:], 0, config, v_dim)])
        if name in ("in_proj_z", "out_proj"):
            return _taking_turns(x, int(name == "out_proj"), config, v_dim)
        return _taking_turns(x, 0, config, 1) if name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else x

    for full, tensor in stored.items():
        name, x = full.replace("model.language_model.", "model."), tensor
        if name.startswith("model.visual."):
            continue
        if name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + 1
        module = name.removesuffix(".weight")
        if module in _MODEL:
            found[f"{_MODEL[module]}.weight"] = x
            continue
        _, _, layer, local = module.split(".", 3)
        if local.startswith("mlp.experts."):
            kind = local.rpartition(".")[2].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(x)
            continue
        if local == "linear_attn.in_proj_qkvz":
            groups = x.reshape(num_keys, -1, x.shape[1])
            of_values = num_values // num_keys * v_dim
            parts = np.split(groups, [k_dim, 2 * k_dim, 2 * k_dim + of_values], axis=1)
            q, k, v, z = (part.reshape(-1, x.shape[1]) for part in parts)
            found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate([q, k, v])
            found[f"blk.{layer}.attn_gate.weight"] = z
            continue
        last = local.rpartition(".")[2]
        x = tiled(last, x.squeeze(1) if last == "conv1d" else x)
        x = -np.exp(x) if last == "A_log" else x.squeeze(0) if last == "shared_expert_gate" else x
        suffix = "" if last in ("A_log", "dt_bias") else ".weight"
        found[f"blk.{layer}.{_DELTA[local]}{suffix}"] = x
    values = {
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim // 4,
        "rope.freq_base": config.rope_parameters["rope_theta"], "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": k_dim, "ssm.group_count": num_keys, "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * v_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    if config.model_type != "qwen3_next":
        values |= {"full_attention_interval": 4, "rope.dimension_sections": [1, 1, 0, 0]}
    found |= {name: np.stack(ones) for name, ones in experts.items()}
    if config.model_type != "qwen3_5_moe_text":
        values["feed_forward_length"] = config.intermediate_size
    if config.model_type == "qwen3_5_text":
        return values, found
    return values | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }, found  # fmt: skip


def write(path: Path, arch: str, config: Any, keys: dict[str, Any], tensors: Tensors) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "context_length": 512, "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads, **keys,
    }  # fmt: skip
    for key, value in values.items():
        add(writer, f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("lfm2")
    writer.add_token_merges(["t 1"])
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")({"bos": 1, "eos": 2, "pad": 0}[name])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LAYOUTS: dict[str, tuple[str, Callable[[Any, Tensors], tuple[dict[str, Any], Tensors]], dict[str, Any]]] = {
    "lfm2": ("lfm2", lfm2, {}),
    "lfm2-width-untied": ("lfm2", lfm2, {"tie_embedding": False, "conv_L_cache": 4}),
    "lfm2_moe": ("lfm2moe", lfm2, {"routed_scaling_factor": 1.0}),
    "qwen3_next": ("qwen3next", delta, {"mlp_only_layers": []}),
    "qwen3_5": ("qwen35", delta, {}),
    "qwen3_5_moe": ("qwen35moe", delta, {}),
}


def converted(name: str, folder: Path, **more: Any) -> Path:
    """The GGUF file of a checkpoint; more: other values of its keys."""
    arch, layout, changes = LAYOUTS[name]
    save_checkpoint(name.partition("-")[0], folder, **changes)
    config = reference_model(folder).config.get_text_config()
    keys, tensors = layout(config, {key: one.numpy() for key, one in load_file(folder / "model.safetensors").items()})
    return write(folder / "model.gguf", arch, config, keys | more, tensors)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = find_model_dir(str(converted(name, tmp_path / "model")))
    assert not ModelConfig.load(folder).unknown_keys
    paged = PagedModel(folder, page_size=16)
    found = torch.cat([paged.step({0: TOKENS[:48]}, {})[0], paged.step({0: TOKENS[48:]}, {})[0]])
    with torch.inference_mode():
        expected = reference_model(tmp_path / "model")(torch.tensor([TOKENS])).logits[0].float()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("lfm2", "attention.head_count_kv", 2),
        ("lfm2", "attention.head_count_kv", [0, 2]),
        ("lfm2", "attention.head_count_kv", [1, 2, 0]),
        ("lfm2_moe", "expert_gating_func", 1),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=rf"{key} is .*; allowed: "):
        find_model_dir(str(converted(name, tmp_path / "model", **{key: value})))


@pytest.mark.skipif(not block_types(torch.device("cpu"), torch.bfloat16), reason="this CPU has no kernels for blocks")
@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2", "qwen3_5"))]
)
def test_weights_in_blocks_are_those_of_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that lie in one tensor, by groups or in turns, are told apart in blocks, too."""
    add_tensor = gguf.GGUFWriter.add_tensor

    def quantized(writer: gguf.GGUFWriter, full: str, x: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0
        if x.ndim == 2 and not x.shape[-1] % 32 and "gate_inp" not in full:
            add_tensor(writer, full, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            add_tensor(writer, full, x)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantized)
    (tmp_path / "model").mkdir()
    folder = find_model_dir(str(converted(name, tmp_path / "model")))
    blocks, numbers = (
        dict(PagedModel(folder, page_size=16, dtype=dtype).model.named_modules())
        for dtype in (torch.bfloat16, torch.float32)
    )
    compared = 0
    for path, module in blocks.items():
        if isinstance(module, BlockLinearMethod) and path in numbers:
            expected = numbers[path].dequantized()
            assert (module.dequantized().float() - expected).abs().max() <= 5e-3 * expected.abs().max(), path
            compared += 1
    assert compared >= 6
