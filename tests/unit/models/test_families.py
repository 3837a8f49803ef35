"""Default configs of the served families are read; with keys and values of other families they are refused by name."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.rotary import rope_table, rotary_table
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families import FAMILIES

# What transformers' default config lacks of a model.
LACKING: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},
    "Gemma4ForConditionalGeneration": {"text_config": {"hidden_size_per_layer_input": 0}},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["full_attention"] * 32,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"] * 16},
}


def default(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of the default model of an architecture, as transformers saves it."""
    config = CONFIG_MAPPING[FAMILIES[architecture].model_type](**LACKING.get(architecture, {}))
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture], **changes}


def test_a_model_imports_its_own_family_alone() -> None:
    code = """
import sys
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
before = set(sys.modules)
ModelConfig.load(find_model_dir("demo"))
print(*(name.rpartition(".")[2] for name in set(sys.modules) - before if ".families." in name))
"""
    imported = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert set(imported) == {"common", "qwen2", "qwen3"}  # the last takes its windows from the second


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_default_config_is_read(architecture: str) -> None:
    config = default(architecture)
    text = config.get("text_config", config)
    if text.get("eos_token_id") is not None:  # of some, beyond the default vocabulary
        text["eos_token_id"] = 2
    model = ModelConfig.from_dicts(config, {})
    assert model.num_layers == text["num_hidden_layers"]
    assert model.unknown_keys == ()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("architectures", "LlamaForCausalLM", "a list of one name"),
        ("layer_types", 3, "a list"),
        ("rope_scaling", {"rope_type": ["yarn"]}, "default, linear, dynamic"),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}, "a number above 0"),
        ("rope_theta", float("nan"), "a number above 0"),
        ("mlp_only_layers", "none", "a list"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words(key: str, value: Any, allowed: str) -> None:
    config = default("Qwen3MoeForCausalLM", eos_token_id=2, rope_parameters=None)
    with pytest.raises(ConfigError, match=f"allowed: {allowed}"):
        ModelConfig.from_dicts({**config, key: value}, {})


def test_dots_calls_the_scores_of_its_experts_by_the_methods_name() -> None:
    """As the released files have it; transformers' class does not read the key."""
    config = default("Dots1ForCausalLM", eos_token_id=2, first_k_dense_replace=1)
    plain = ModelConfig.from_dicts(config, {})
    assert ModelConfig.from_dicts({**config, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"}, {}) == plain
    assert plain.mixture is not None
    assert plain.mixture.router.scores == "sigmoid"


@pytest.mark.parametrize(
    ("architecture", "like"),
    [
        ("Gemma3nForCausalLM", "like Gemma3ForCausalLM, GemmaForCausalLM, Gemma4ForCausalLM; "),
        ("DeepseekForCausalLM", "like DeepseekV3ForCausalLM, DeepseekV2ForCausalLM; "),
        ("BloomForCausalLM", ""),
        ("T5ForConditionalGeneration", ""),
    ],
)
def test_architectures_with_a_name_alike_are_told(architecture: str, like: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dicts({"architectures": [architecture]}, {})
    assert f"native families, {like}docs/models.md lists them" in str(caught.value)


# Mistral 3's default text model has a theta that its class has not.
@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - {"Mistral3ForConditionalGeneration"}))
def test_theta_of_a_config_without_rope_keys(architecture: str) -> None:
    """As of transformers' config class."""
    config = default(architecture, eos_token_id=2)
    text = config.get("text_config", config)
    text["eos_token_id"] = 2
    meant = text.pop("rope_parameters")
    layers = ModelConfig.from_dicts(config, {}).layers
    types = text["layer_types"] if "full_attention" in meant else [None] * len(layers)
    ropes = [(layer.mixer.rope, meant[kind] if kind else meant) for layer, kind in zip(layers, types, strict=True)]
    assert any(rope for rope, _ in ropes)
    assert all(rope is None or rope.theta == values["rope_theta"] for rope, values in ropes)


def test_original_positions_of_phi3_where_config_json_has_none() -> None:
    """They count more than those in rope_parameters."""
    factors = [1.0] * 48
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 2048
    config = default(PHI3, max_position_embeddings=131072, rope_parameters=rope, eos_token_id=2)
    del config["original_max_position_embeddings"]
    read = ModelConfig.from_dicts(config, {}).layers[0].mixer.rope
    meant = CONFIG_MAPPING["phi3"](max_position_embeddings=131072, rope_parameters=dict(rope)).rope_parameters
    assert read is not None
    assert read.original_max_position == meant["original_max_position_embeddings"] == 4096


def test_a_dynamic_rope_is_that_of_the_longest_sequence() -> None:
    """As transformers has it for a sequence of that length; within the context it changes nothing."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 20000.0}
    read = ModelConfig.from_dicts(default(LLAMA, rope_parameters=dynamic), {})
    rope, cpu = read.layers[0].mixer.rope, torch.device("cpu")
    assert rope is not None
    context = default(LLAMA)["max_position_embeddings"]
    assert read.max_seq_len() == context
    assert read.max_position == read.max_seq_len(4 * context) == 4 * context
    for length in (64, context, context + 1, 3 * context, 4 * context):
        meant, _ = ROPE_INIT_FUNCTIONS["dynamic"](CONFIG_MAPPING["llama"](rope_parameters=dynamic), cpu, seq_len=length)
        torch.testing.assert_close(rope_table(rope, 128, length, cpu), rotary_table(meant, length, cpu))
    with pytest.raises(ConfigError, match="alpha"):
        ModelConfig.from_dicts(default(LLAMA, rope_parameters={**dynamic, "alpha": 1000.0}), {})


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),  # Vicuna 16k
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        (
            {
                "max_position_embeddings": 16384,
                "rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096},
            },
            16384,
        ),
        ({"max_position_embeddings": None, "max_sequence_length": 2048}, 2048),  # the first conversions of LLaMA
        ({"max_position_embeddings": None, "n_positions": 1024, "seq_length": 512}, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),  # Command R
        ({"max_position_embeddings": 8192, "model_max_length": 2048}, 8192),
        ({"max_position_embeddings": 8192, "model_max_length": int(1e30)}, 8192),  # a tokenizer without a limit
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "default"}}, 8192),
    ],
)
def test_the_longest_sequence(changes: dict[str, Any], longest: int) -> None:
    read = ModelConfig.from_dicts(default(LLAMA, rope_parameters=None, **changes), {})
    assert read.max_seq_len() == read.max_position == read.max_seq_len(longest) == longest
    with pytest.raises(ConfigError, match=f"max_seq_len_override is {longest + 1}; allowed: 2 to {longest}"):
        read.max_seq_len(longest + 1)


def test_gemma3_says_its_length_behind_the_scaling() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    read = ModelConfig.from_dicts(default(GEMMA3, rope_parameters=None, rope_scaling=scaling, eos_token_id=2), {})
    assert read.max_position == default(GEMMA3)["max_position_embeddings"]


@pytest.mark.parametrize(
    ("architecture", "bound"), [(name, n) for name in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM") for n in (0, 3, 9)]
)
def test_layers_with_windows_are_those_of_transformers(architecture: str, bound: int) -> None:
    sizes = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 512, "max_window_layers": bound}
    meant = CONFIG_MAPPING[FAMILIES[architecture].model_type](**sizes).layer_types
    config = default(architecture, **sizes, layer_types=None, eos_token_id=2)
    windows = [layer.mixer.window for layer in ModelConfig.from_dicts(config, {}).layers]
    assert windows == [512 if kind == "sliding_attention" else None for kind in meant]


@pytest.mark.parametrize(
    ("pattern", "slides"), [("LLLG", "LLLGLLLG"), (4, "LLLGLLLG"), ("LG", "LGLGLGLG"), ("LLL", "LLLLLLLG")]
)
def test_patterns_of_exaone4(pattern: str | int, slides: str) -> None:
    """transformers documents letters, after which the last layer is global."""
    changes = {"num_hidden_layers": 8, "sliding_window": 512, "sliding_window_pattern": pattern, "layer_types": None}
    layers = ModelConfig.from_dicts(default("Exaone4ForCausalLM", **changes), {}).layers
    assert [layer.mixer.window for layer in layers] == [512 if one == "L" else None for one in slides]
    assert [layer.mixer.rope is not None for layer in layers] == [one == "L" for one in slides]


LLAMA, MISTRAL, QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
QWEN3, QWEN3_MOE, QWEN2_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"
OLMO2, GRANITE, GEMMA2, GEMMA3 = (f"{name}ForCausalLM" for name in ("Olmo2", "Granite", "Gemma2", "Gemma3"))
PHI3, MIXTRAL, GLM4_MOE = "Phi3ForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"
OLMO3, LFM2 = "Olmo3ForCausalLM", "Lfm2ForCausalLM"
DEEPSEEK_V2, DEEPSEEK_V3, GLM_FLASH = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"

ALTERED: list[tuple[str, str, Any]] = [
    (LLAMA, "model_type", "granite"),
    (LLAMA, "hidden_act", "relu2"),
    (LLAMA, "partial_rotary_factor", 0.5),
    (LLAMA, "layer_types", ["sliding_attention"] * 32),
    (LLAMA, "sliding_window", 512),
    (LLAMA, "logit_scale", 0.0625),
    (LLAMA, "quantization_config", {"quant_method": "hqq"}),
    (LLAMA, "is_encoder_decoder", True),
    (MISTRAL, "attention_bias", True),
    (MISTRAL, "rope_parameters", {"rope_type": "mrope", "factor": 2.0}),
    (QWEN2, "use_mrope", True),
    (QWEN2, "dual_chunk_attention_config", {"chunk_size": 262144}),
    (GRANITE, "hidden_act", "relu2"),
    (QWEN3, "hidden_act", "relu2"),
    (QWEN2, "scale_emb", 12),
    (QWEN3_MOE, "shared_expert_intermediate_size", 512),
    (QWEN2_MOE, "n_shared_experts", 2),
    (PHI3, "hidden_act", "relu"),
    (MIXTRAL, "hidden_act", "relu2"),
    (OLMO2, "layer_types", ["sliding_attention"] * 32),
    (GEMMA3, "rope_parameters", {"full_attention": 3}),
    (GEMMA3, "rope_parameters", {"rope_type": "default", "rope_theta": 10.0}),
    (OLMO3, "layer_types", ["chunked_attention"] * 32),
    (OLMO3, "sliding_window", None),
    (OLMO3, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    (OLMO3, "rope_parameters", {"full_attention": "default"}),
    (GEMMA2, "hidden_activation", "relu"),
    (GEMMA2, "use_bidirectional_attention", True),
    (GEMMA2, "query_pre_attn_scalar", 0),
    (GEMMA3, "layer_types", ["chunked_attention"] * 26),
    ("SmolLM3ForCausalLM", "no_rope_layers", [1, 0]),
    (LFM2, "layer_types", ["conv"] * 16),
    (LFM2, "layer_types", ["linear_attention", *["full_attention"] * 31]),
    (LFM2, "conv_L_cache", 1),
    (LFM2, "conv_dim", 512),
    (LFM2, "use_pos_enc", False),
    ("Lfm2MoeForCausalLM", "num_experts_per_tok", 33),
    ("Lfm2MoeForCausalLM", "layer_types", None),
    ("Ernie4_5ForCausalLM", "use_bias", True),
    ("CohereForCausalLM", "use_qk_norm", True),
    ("ArceeForCausalLM", "hidden_act", "xielu"),
    ("NemotronForCausalLM", "norm_eps", 0),
    ("Starcoder2ForCausalLM", "norm_type", "rms_norm"),
    ("OlmoeForCausalLM", "clip_qkv", 8.0),
    ("GraniteMoeForCausalLM", "num_experts_per_tok", 9),
    ("GraniteMoeForCausalLM", "shared_intermediate_size", 64),
    ("GptOssForCausalLM", "swiglu_limit", 6.0),
    ("GptOssForCausalLM", "swiglu_alpha", 1.0),
    ("GptOssForCausalLM", "hidden_act", "gelu"),
    ("GptOssForCausalLM", "num_experts_per_tok", 129),
    ("GptOssForCausalLM", "quantization_config", {"quant_method": "quark"}),
    ("StableLmForCausalLM", "qk_layernorm", True),
    ("Jais2ForCausalLM", "hidden_act", "xielu"),
    ("GraniteMoeSharedForCausalLM", "shared_intermediate_size", -1),
    ("GemmaForCausalLM", "hidden_act", "silu"),
    ("GemmaForCausalLM", "use_bidirectional_attention", True),
    ("SolarOpenForCausalLM", "first_k_dense_replace", 1),
    ("ExaoneMoeForCausalLM", "mlp_layer_types", ["dense"]),
    ("ExaoneMoeForCausalLM", "topk_group", 2),
    (GLM4_MOE, "scoring_func", "softmax"),
    (GLM4_MOE, "topk_method", "greedy"),
    (GLM4_MOE, "n_group", 3),
    (DEEPSEEK_V2, "topk_method", "noaux_tc"),
    (DEEPSEEK_V2, "scoring_func", "sigmoid"),
    (DEEPSEEK_V2, "norm_topk_prob", True),
    (DEEPSEEK_V2, "moe_layer_freq", 2),
    (DEEPSEEK_V3, "num_key_value_heads", 8),
    (DEEPSEEK_V3, "qk_rope_head_dim", 63),
    (GLM_FLASH, "mlp_layer_types", ["sparse"]),
    (GLM4_MOE, "topk_group", 2),
    (GLM4_MOE, "num_experts_per_tok", 129),
    (GLM4_MOE, "hidden_act", "relu2"),
    ("Dots1ForCausalLM", "first_k_dense_replace", -1),
    ("MiniMaxM2ForCausalLM", "use_qk_norm", False),
    ("MiniMaxM2ForCausalLM", "attn_type_list", [1, 0]),
    ("MiniMaxM2ForCausalLM", "shared_intermediate_size", 64),
    ("MiniMaxM2ForCausalLM", "rotary_dim", 256),
    ("Ernie4_5_MoeForCausalLM", "use_bias", True),
    ("Ernie4_5_MoeForCausalLM", "moe_norm_min", 0.5),
    ("Ernie4_5_MoeForCausalLM", "moe_k", 65),
    ("Ernie4_5_MoeForCausalLM", "moe_layer_end_index", "last"),
    ("Cohere2ForCausalLM", "logit_scale", 0),
    ("Cohere2ForCausalLM", "layer_types", ["chunked_attention"] * 40),
    ("Cohere2ForCausalLM", "sliding_window", None),
    ("ApertusForCausalLM", "hidden_act", "relu2"),
    ("ApertusForCausalLM", "post_norm", True),
    ("CwmForCausalLM", "sliding_window", None),
    ("ExaoneForCausalLM", "activation_function", "relu"),
    ("FlexOlmoForCausalLM", "num_experts_per_tok", 8),
    ("Gemma4ForCausalLM", "hidden_size_per_layer_input", 256),
    ("Gemma4ForCausalLM", "num_kv_shared_layers", 10),
    ("Gemma4ForCausalLM", "enable_moe_block", True),
    ("Gemma4ForCausalLM", "use_bidirectional_attention", "all"),
    ("Gemma4ForCausalLM", "per_layer_config", {"5": {"sliding_window": 8}}),
    ("Gemma4ForConditionalGeneration", "text_config", None),
    ("GraniteMoeHybridForCausalLM", "num_local_experts", 8),
    ("GraniteMoeHybridForCausalLM", "layer_types", ["linear_attention"] * 32),
    ("GraniteMoeHybridForCausalLM", "position_embedding_type", "alibi"),
    ("GraniteSWAForCausalLM", "layer_rope_theta", [10000.0]),
    ("GraniteMoeSWAForCausalLM", "layer_rope_theta", [-1.0] * 32),
    ("HeliumForCausalLM", "head_dim", 64),
    ("HunYuanDenseV1ForCausalLM", "num_experts", 8),
    ("HunYuanDenseV1ForCausalLM", "use_cla", True),
    ("HunYuanMoEV1ForCausalLM", "moe_topk", [1, 2]),
    ("HunYuanMoEV1ForCausalLM", "moe_intermediate_size", 3072),
    ("HyperCLOVAXForCausalLM", "use_post_norm", False),
    ("IQuestCoderForCausalLM", "use_sliding_window", True),
    ("InternLM3ForCausalLM", "mlp_bias", True),
    ("MellumForCausalLM", "mlp_layer_types", ["sparse"]),
    ("Ministral3ForCausalLM", "rope_parameters", {"rope_type": "ntk", "llama_4_scaling_beta": 0.1}),
    ("Mistral3ForConditionalGeneration", "text_config", None),
    ("OlmoForCausalLM", "clip_qkv", 8.0),
    ("Qwen2VLForConditionalGeneration", "text_config", None),
    ("Qwen2_5_VLForConditionalGeneration", "text_config", "qwen2"),
    ("Qwen3VLForConditionalGeneration", "text_config", None),
    ("Qwen3VLMoeForConditionalGeneration", "text_config", []),
    ("SarvamMLAForCausalLM", "scoring_func", "softmax"),
    ("SarvamMoEForCausalLM", "num_experts_per_tok", 129),
    ("VaultGemmaForCausalLM", "query_pre_attn_scalar", 0),
    (GEMMA3, "rope_parameters", {"full_attention": {"rope_type": "proportional"}}),
]


@pytest.mark.parametrize(("architecture", "key", "value"), ALTERED)
def test_an_altered_config_is_refused_by_name(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{key}|rope_type"):
        ModelConfig.from_dicts(default(architecture, **{key: value}), {})


ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_another_activation_is_refused_by_name(architecture: str) -> None:
    """Of every family, without a row."""
    config = default(architecture)
    text = config.get("text_config", config)
    key = next((key for key in ACTIVATION_KEYS if key in text), ACTIVATION_KEYS[0])
    text.update({key: "none such", "eos_token_id": 2})
    with pytest.raises(ConfigError, match=f'{key} is "none such"; allowed: '):
        ModelConfig.from_dicts(config, {})


_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
OLDER: list[tuple[str, dict[str, Any]]] = [  # keys as configs for transformers 4 have them
    (LFM2, {"full_attn_idxs": [2, 5, 8], "block_ff_dim": 6656, "intermediate_size": 8192, "rope_theta": 1e6}),
    (LFM2, {"tie_embedding": False, "tie_word_embeddings": True, "block_ffn_dim_multiplier": 1.3}),
    (OLMO3, {"rope_theta": 500000, "rope_scaling": _YARN, "max_position_embeddings": 65536}),
    (OLMO3, {"rope_theta": 20.0, "rope_parameters": {"sliding_attention": {"rope_theta": 10.0}}}),
    (
        GEMMA3,
        {"rope_theta": 10.0, "rope_local_base_freq": 20.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
]


@pytest.mark.parametrize(("architecture", "given"), OLDER)
def test_an_older_spelling_means_what_transformers_makes_of_it(architecture: str, given: dict[str, Any]) -> None:
    config = default(architecture, **{"eos_token_id": 2, "rope_parameters": None, "layer_types": None, **given})
    saved = CONFIG_MAPPING[FAMILIES[architecture].model_type](**copy.deepcopy(given), eos_token_id=2)
    meant = {**json.loads(saved.to_json_string(use_diff=False)), "architectures": [architecture]}
    assert ModelConfig.from_dicts(config, {}) == ModelConfig.from_dicts(meant, {})


def test_theta_of_olmo3_that_versions_of_transformers_read_otherwise() -> None:
    config = default(OLMO3, rope_parameters=None, rope_theta=10000.0, eos_token_id=2)
    with pytest.raises(ConfigError, match=r"rope_theta is 10000.0; allowed: 500000.0, or a rope_theta for each"):
        ModelConfig.from_dicts(config, {})
