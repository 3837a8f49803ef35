"""`model_impl`: which code runs a folder, and how what neither runs is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.fallback import describe
from tests.parity.decoder_types import small_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def _folder(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def _of_type(path: Path, model_type: str, architecture: str, **changes: Any) -> Path:
    config = small_config(model_type, **changes)
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


def test_native_is_preferred_and_needs_no_torch(tmp_path: Path) -> None:
    folder = _folder(tmp_path, LLAMA)
    program = (
        "import sys; from minisgl_backend.models.choose import load_model_config; "
        f"print(load_model_config({str(folder)!r}).implementation, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["native", "False"]


def test_native_families_run_through_transformers_where_asked(tmp_path: Path) -> None:
    config = load_model_config(_folder(tmp_path, LLAMA), "transformers")
    assert (config.implementation, config.num_layers, config.head_dims, config.max_position) == (
        "transformers",
        2,
        (8,),
        128,
    )
    with pytest.raises(ConfigError, match="tp is 2; allowed: 1 for LlamaForCausalLM, which runs through transformers"):
        config.check_tensor_parallel(2)


@pytest.mark.parametrize("architectures", [None, []])
def test_without_architectures_the_type_decides(architectures: Any, tmp_path: Path) -> None:
    """As in transformers."""
    config = load_model_config(_folder(tmp_path, {**LLAMA, "architectures": architectures, "model_type": "qwen2"}))
    assert (config.architecture, config.implementation) == ("Qwen2ForCausalLM", "native")
    with pytest.raises(ConfigError, match=r"config.json: architectures is \[\]"):
        load_model_config(_folder(tmp_path, {**LLAMA, "architectures": architectures, "model_type": None}))


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "lengths"),
    [
        ("phi", "PhiForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, (2048, 2048)),
        ("phi", "PhiForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, (512, 2048)),
        ("phi", "PhiForCausalLM", {"model_max_length": 4096}, (4096, 4096)),
        ("gpt2", "GPT2LMHeadModel", {"model_max_length": 4096}, (512, 512)),  # learned positions: there are no more
    ],
)
def test_the_longest_sequence_through_transformers_code(
    model_type: str, architecture: str, changes: dict[str, Any], lengths: tuple[int, int], tmp_path: Path
) -> None:
    config = load_model_config(_of_type(tmp_path, model_type, architecture, **changes), "transformers")
    assert (config.max_seq_len(), config.max_position) == lengths


def test_auto_falls_back_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _of_type(tmp_path, "modernbert-decoder", "ModernBertDecoderForCausalLM")
    with caplog.at_level(logging.WARNING):
        config = load_model_config(folder)
    assert config.implementation == "transformers"
    assert len({layer.mixer.window for layer in config.layers}) == 2
    assert "ModernBertDecoderForCausalLM runs through transformers' own code" in caplog.text
    assert "architectures is" in caplog.text
    with pytest.raises(ConfigError, match="architectures"):
        load_model_config(folder, "native")


def test_what_neither_serves_is_refused_with_both_reasons(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {**LLAMA, "architectures": ["NoSuchForCausalLM"], "model_type": "no_such"})
    with pytest.raises(
        ConfigError, match=r'NoSuch.*Nor .*model_type is "no_such", which transformers .* does not have'
    ):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("bloom", "BloomForCausalLM", "takes no position_ids"),
        ("bert", "BertLMHeadModel", r"attends to later tokens \(it is no decoder\)"),
        ("mamba", "MambaForCausalLM", "with a state other than keys and values"),
        *(
            (model_type, f"{name}ForCausalLM", "with a state other than keys and values")
            for model_type, name in (
                ("bamba", "Bamba"),
                ("falcon_h1", "FalconH1"),
                ("granitemoehybrid", "GraniteMoeHybrid"),
                ("jamba", "Jamba"),
                ("kimi_linear", "KimiLinear"),
                ("bailing_hybrid", "BailingHybrid"),
                ("minimax", "MiniMax"),
                ("nemotron_h", "NemotronH"),
            )
        ),
        ("doge", "DogeForCausalLM", "masks attention in a way of its own"),
        ("bart", "BartForCausalLM", "is_encoder_decoder is true"),
        (
            "openai-gpt",
            "OpenAIGPTLMHeadModel",
            "computes attention itself, outside of transformers' attention interface",
        ),
        ("llama4_text", "Llama4ForCausalLM", "masks attention in a way of its own, as in chunks"),
        ("falcon", "FalconForCausalLM", "computes attention itself, outside of transformers' attention interface"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    model_type: str, architecture: str, reason: str, tmp_path: Path
) -> None:
    folder = _of_type(tmp_path, model_type, architecture)
    with pytest.raises(ConfigError, match=reason):
        load_model_config(folder, "transformers")


def test_a_module_that_the_config_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in torch's words alone."""
    folder = _of_type(tmp_path, "phi", "PhiForCausalLM")
    wrong = torch.nn.Linear(7, 8)
    build = describe.build_on_meta

    def damaged(source: Any) -> Any:
        model = build(source)
        model.model.layers[1].mlp.fc1 = wrong.to("meta")
        return model

    monkeypatch.setattr(describe, "build_on_meta", damaged)
    said = r"PhiForCausalLM .*: it has a module that does not run with this config.json: layers.1.mlp.fc1, a Linear: "
    with pytest.raises(ConfigError, match=said.replace("layers", "model.layers")):
        load_model_config(folder, "transformers")


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen3NewForCausalLM", "Qwen3NextForCausalLM"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("MistralForCausalLm", "MistralForCausalLM"),
    ],
)
def test_a_refusal_is_short_and_names_the_nearest(architecture: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(_folder(tmp_path, {**LLAMA, "architectures": [architecture]}), "native")
    said = str(caught.value)
    assert said.startswith(f'config.json: architectures is ["{architecture}"]; allowed: one of the ')
    assert f"native families, like {nearest}, " in said
    assert len(said) < 300


@pytest.mark.parametrize("model_impl", ["auto", "native", "transformers"])
@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_encoder_decoders_are_refused_as_such(architecture: str, model_impl: str, tmp_path: Path) -> None:
    config = {"architectures": [architecture], "model_type": architecture[:-24].lower(), "is_encoder_decoder": True}
    with pytest.raises(ConfigError, match=r"^config.json: is_encoder_decoder is true; allowed: false: only decoders"):
        load_model_config(_folder(tmp_path, config), model_impl)


def test_code_of_a_folder_needs_consent(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    with pytest.raises(ConfigError, match="Python code for it, which runs with trust_remote_code"):
        load_model_config(folder, "transformers")


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    with pytest.raises(ConfigError, match=r"quantization_config is .*awq"):
        load_model_config(folder, "transformers")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NVFP4 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
# What says that weights are quantized: keys of config.json, another file, and its content; what is told of it.
QUANTIZED: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "", None, "config.json: quantization_config"),
    ({"compression_config": {"quant_method": "sparse"}}, "", None, "config.json: compression_config"),
    ({"text_config": {"quantization_config": {"quant_method": "exl3"}}}, "", None,
     "config.json: text_config.quantization_config"),
    ({}, "hf_quant_config.json", NVFP4, "hf_quant_config.json: quantization"),
    ({}, "hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "hf_quant_config.json: quantization"),
    ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "", None, "config.json: quantization"),
    ({}, "hf_quant_config.json", {"quant_algo": "MXFP8", "ignore": []}, "hf_quant_config.json"),
    ({}, "quantize_config.json", {"bits": 3, "group_size": 128, "sym": True}, "quantize_config.json"),
    ({}, "quant_config.json", {"w_bit": 3, "q_group_size": 128, "version": "GEMM"}, "quant_config.json"),
    ({}, "quantization_config.json", {"quant_method": "auto-round", "bits": 2}, "quantization_config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "file", "content", "path"), QUANTIZED)
def test_both_read_in_one_place_what_says_quantized(
    keys: dict[str, Any], file: str, content: Any, path: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, {**LLAMA, **keys})
    if file:
        (folder / file).write_text(json.dumps(content))
    for implementation in ("auto", "native"):
        with pytest.raises(ConfigError) as refused:
            load_model_config(folder, implementation)
        assert str(refused.value).startswith(path)
        assert "transformers' code" not in str(refused.value)  # one reason, not two
    with pytest.raises(
        ConfigError, match=r"allowed: absent, for models that run through transformers' code"
    ) as refused:
        load_model_config(folder, "transformers")
    assert str(refused.value).startswith(path)


def test_what_no_native_family_has_is_refused_for_both_reasons(tmp_path: Path) -> None:
    folder = _of_type(tmp_path, "modernbert-decoder", "ModernBertDecoderForCausalLM")
    (folder / "hf_quant_config.json").write_text(json.dumps(NVFP4))
    with pytest.raises(
        ConfigError, match=r"architectures is .*Nor does it run .*: hf_quant_config.json: quantization is"
    ):
        load_model_config(folder)


def test_files_of_older_tools_are_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, LLAMA)
    assert load_model_config(folder).quantization.schemes == ()
    (folder / "quant_config.json").write_text(
        '{"zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}'
    )
    assert "(awq), groups of 128" in str(load_model_config(folder).quantization.schemes[0])
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 64, "desc_act": false, "sym": true}')
    assert "(gptq), groups of 64" in str(load_model_config(folder).quantization.schemes[0])
    _folder(folder, {**LLAMA, "quantization_config": AWQ})  # which counts first
    assert "(awq), groups of 128" in str(load_model_config(folder).quantization.schemes[0])


def test_a_calibrated_cache_alone_is_no_quantization(tmp_path: Path) -> None:
    folder = _folder(tmp_path, LLAMA)
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    for implementation in ("native", "transformers"):
        config = load_model_config(folder, implementation)
        assert (config.implementation, config.quantization.schemes) == (implementation, ())
