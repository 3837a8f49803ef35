"""Tiny random checkpoints of every served architecture, saved by transformers itself."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import tokenizers.models
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.parity.checkpoint_options import (
    CONVS,
    DELTA,
    ENCODER,
    GEMMA,
    GEMMA4,
    GEMMA4_LARGE,
    GEMMA4_SMALL,
    GRANITE,
    LATENT,
    LLAMA3_ROPE,
    LLAMA4,
    LLAMA4_ENCODER,
    MOE,
    MROPE,
    PIXTRAL,
    ROUTED,
    SIZES,
    SLIDES,
    VOCAB_SIZE,
    YARN_ROPE,
)


class Plan(NamedTuple):
    """A checkpoint whose model is not made yet."""

    model_class: Any
    config: Any
    shard_size: str = "5GB"

    @property
    def config_json(self) -> dict[str, Any]:
        """config.json with every key of the config's class."""
        text = self.config.to_json_string(use_diff=False)
        return {**json.loads(text), "architectures": [self.model_class.__name__]}


def _maker(
    architecture: str, shard_size: str = "5GB", model_type: str | None = None, **options: Any
) -> Callable[..., Plan]:
    """`model_type`: where it is another than that of the class."""

    def make(**changes: Any) -> Plan:
        model_class = getattr(transformers, architecture)
        config_class = CONFIG_MAPPING[model_type] if model_type else model_class.config_class
        return Plan(model_class, config_class(**{**SIZES, **options, **changes}), shard_size)

    return make


def _vision_maker(architecture: str, vision: dict[str, Any], **text: Any) -> Callable[..., Plan]:
    """A text model with an encoder of images, which is not used."""

    def make(**changes: Any) -> Plan:
        model_class = getattr(transformers, architecture)
        text_config = {**SIZES, **text, **changes}
        return Plan(model_class, model_class.config_class(text_config=text_config, vision_config=dict(vision)))

    return make


CHECKPOINTS: dict[str, Callable[..., Plan]] = {
    "llama": _maker("LlamaForCausalLM"),
    "llama-llama3-tied": _maker("LlamaForCausalLM", tie_word_embeddings=True, rope_scaling=dict(LLAMA3_ROPE)),
    "llama-bias-mha": _maker("LlamaForCausalLM", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama4": _maker("Llama4ForCausalLM", **LLAMA4),
    "llama4-dense-no-chunks": _maker(
        "Llama4ForCausalLM",
        **{**LLAMA4, "moe_layers": [], "attention_chunk_size": None, "use_qk_norm": False},
        attn_temperature_tuning=False,
        attention_bias=True,
    ),
    "llama4-vision": _vision_maker("Llama4ForConditionalGeneration", LLAMA4_ENCODER, **LLAMA4),
    "mistral": _maker("MistralForCausalLM", sliding_window=None, head_dim=32),
    "mistral-window": _maker("MistralForCausalLM", sliding_window=24),
    "qwen2-windows-above": _maker("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3-windows-between": _maker(
        "Qwen3ForCausalLM",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_moe-window": _maker("Qwen3MoeForCausalLM", head_dim=16, use_sliding_window=True, sliding_window=24, **MOE),
    "qwen2-tied": _maker("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen2-yarn": _maker("Qwen2ForCausalLM", rope_scaling=dict(YARN_ROPE)),
    "qwen3-tied-sharded": _maker("Qwen3ForCausalLM", "100KB", tie_word_embeddings=True, head_dim=32),
    "qwen3-yarn": _maker("Qwen3ForCausalLM", head_dim=16, rope_scaling=dict(YARN_ROPE)),
    "qwen3_moe": _maker("Qwen3MoeForCausalLM", head_dim=16, norm_topk_prob=True, **MOE),
    "qwen3_moe-sharded-mixed": _maker(
        "Qwen3MoeForCausalLM", "100KB", head_dim=16, mlp_only_layers=[1], tie_word_embeddings=True, **MOE
    ),
    "phi3": _maker("Phi3ForCausalLM", pad_token_id=0),
    "phi3-longrope-partial-window": _maker(
        "Phi3ForCausalLM",
        pad_token_id=0,
        sliding_window=24,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
    ),
    "mixtral": _maker("MixtralForCausalLM", sliding_window=24, num_local_experts=6, num_experts_per_tok=2),
    "qwen2_moe": _maker("Qwen2MoeForCausalLM", shared_expert_intermediate_size=48, mlp_only_layers=[1], **MOE),
    "olmo2": _maker("Olmo2ForCausalLM", pad_token_id=0),
    "olmo2-mha": _maker("Olmo2ForCausalLM", pad_token_id=0, num_key_value_heads=4, attention_bias=True),
    "olmo3": _maker("Olmo3ForCausalLM", pad_token_id=0, sliding_window=24, layer_types=SLIDES),
    "olmo3-yarn-mha": _maker(
        "Olmo3ForCausalLM",
        pad_token_id=0,
        num_key_value_heads=4,
        attention_bias=True,
        sliding_window=24,
        layer_types=SLIDES,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {**YARN_ROPE, "rope_theta": 10000.0},
        },
    ),
    "granite": _maker("GraniteForCausalLM", **GRANITE),
    "gemma2": _maker("Gemma2ForCausalLM", head_dim=32, query_pre_attn_scalar=20, sliding_window=24, **GEMMA),
    "gemma3": _maker(
        "Gemma3ForCausalLM", head_dim=32, query_pre_attn_scalar=20, sliding_window=24, layer_types=SLIDES, **GEMMA
    ),
    "gemma3-linear-untied": _maker(
        "Gemma3ForCausalLM",
        tie_word_embeddings=False,
        head_dim=16,
        final_logit_softcapping=20.0,
        layer_types=SLIDES,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
        **GEMMA,
    ),
    "gemma4": _maker("Gemma4ForCausalLM", **GEMMA4),
    "gemma4-small-full": _maker("Gemma4ForCausalLM", **GEMMA4_SMALL),
    "gemma4-large-full": _maker("Gemma4ForCausalLM", **GEMMA4_LARGE),
    "smollm3": _maker("SmolLM3ForCausalLM", pad_token_id=0, no_rope_layers=[1, 0, 1]),
    "smollm3-window": _maker(
        "SmolLM3ForCausalLM", pad_token_id=0, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=24
    ),
    "seed_oss": _maker("SeedOssForCausalLM", head_dim=32, attention_out_bias=True),
    "ernie4_5": _maker("Ernie4_5ForCausalLM", head_dim=32),
    "cohere": _maker("CohereForCausalLM", pad_token_id=0, logit_scale=0.5, attention_bias=True),
    "cohere2": _maker(
        "Cohere2ForCausalLM", pad_token_id=0, logit_scale=0.5, sliding_window=24, layer_types=SLIDES, hidden_act="gelu"
    ),
    "glm4": _maker("Glm4ForCausalLM", head_dim=32, pad_token_id=0, attention_bias=True),
    "glm4_moe": _maker("Glm4MoeForCausalLM", head_dim=32, attention_bias=True, use_qk_norm=True, **ROUTED),
    "glm4_moe-groups": _maker(
        "Glm4MoeForCausalLM",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=False,
        first_k_dense_replace=2,
        **ROUTED,
    ),
    "dots1": _maker("Dots1ForCausalLM", first_k_dense_replace=1, sliding_window=24, max_window_layers=1, **ROUTED),
    "minimax_m2": _maker(
        "MiniMaxM2ForCausalLM",
        head_dim=32,
        rotary_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        # transformers 5.17 does not read rotary_dim.
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ernie4_5_moe": _maker(
        "Ernie4_5_MoeForCausalLM", head_dim=32, moe_intermediate_size=32, moe_num_experts=6, moe_k=2
    ),
    "arcee": _maker("ArceeForCausalLM", mlp_bias=True),
    "nemotron": _maker("NemotronForCausalLM", head_dim=32),
    "starcoder2": _maker("Starcoder2ForCausalLM", sliding_window=24),
    "olmoe": _maker("OlmoeForCausalLM", num_experts=6, num_experts_per_tok=2),
    "granitemoe": _maker("GraniteMoeForCausalLM", num_local_experts=6, num_experts_per_tok=2, **GRANITE),
    "glm": _maker("GlmForCausalLM", head_dim=32, pad_token_id=0),
    "gemma": _maker("GemmaForCausalLM", head_dim=32, pad_token_id=0),
    "solar_open": _maker("SolarOpenForCausalLM", head_dim=32, pad_token_id=0, attention_bias=True, **ROUTED),
    "exaone_moe": _maker(
        "ExaoneMoeForCausalLM", sliding_window=24, layer_types=SLIDES, num_shared_experts=2, n_group=2, **MOE
    ),
    "stablelm": _maker("StableLmForCausalLM", use_qkv_bias=True),
    "stablelm-parallel": _maker("StableLmForCausalLM", use_parallel_residual=True),
    "jais2": _maker("Jais2ForCausalLM"),
    "granitemoeshared": _maker(
        "GraniteMoeSharedForCausalLM",
        attention_multiplier=0.1,
        residual_multiplier=0.4,
        shared_intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "gpt_oss": _maker(
        "GptOssForCausalLM",
        head_dim=32,
        pad_token_id=0,
        sliding_window=24,
        layer_types=SLIDES,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={**YARN_ROPE, "truncate": False},
        attn_implementation="eager",
    ),
    "deepseek_v2": _maker(
        "DeepseekV2ForCausalLM",
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters={**YARN_ROPE, "rope_theta": 10000.0, "mscale": 0.8, "mscale_all_dim": 0.5},
        **LATENT,
        **ROUTED,
    ),
    "deepseek_v2-lite": _maker("DeepseekV2ForCausalLM", **{**LATENT, **ROUTED, "q_lora_rank": None}),
    "deepseek_v3": _maker(
        "DeepseekV3ForCausalLM",
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        attention_bias=True,
        rope_parameters={**YARN_ROPE, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        **LATENT,
        **ROUTED,
    ),
    # Kimi-K2's shape.
    "deepseek_v3-one-group": _maker(
        "DeepseekV3ForCausalLM", first_k_dense_replace=1, n_group=1, topk_group=1, **LATENT, **ROUTED
    ),
    "glm4_moe_lite": _maker("Glm4MoeLiteForCausalLM", rope_interleave=False, **LATENT, **ROUTED),
    "exaone4": _maker("Exaone4ForCausalLM", sliding_window=24, layer_types=SLIDES),
    "exaone4-full": _maker("Exaone4ForCausalLM", sliding_window=None, layer_types=["full_attention"] * 3),
    "apertus": _maker("ApertusForCausalLM", pad_token_id=0, attention_bias=True, rope_parameters=dict(LLAMA3_ROPE)),
    "cwm": _maker("CwmForCausalLM", head_dim=32, sliding_window=24, layer_types=SLIDES),
    "exaone": _maker("LlamaForCausalLM", model_type="exaone"),
    "flex_olmo": _maker("FlexOlmoForCausalLM", pad_token_id=0, num_experts=6, num_experts_per_tok=2),
    "granitemoehybrid": _maker(
        "GraniteMoeHybridForCausalLM",
        layer_types=["full_attention"] * 3,
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=48,
        mamba_n_heads=4,
        attention_multiplier=0.1,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
    "granite_swa": _maker(
        "GraniteSWAForCausalLM",
        pad_token_id=0,
        sliding_window=24,
        layer_types=SLIDES,
        layer_rope_theta=[10000.0, 0, 100.0],
        attention_multiplier=0.1,
        attn_implementation="eager",
    ),
    "granitemoe_swa": _maker(
        "GraniteMoeSWAForCausalLM",
        sliding_window=24,
        layer_types=SLIDES,
        shared_intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=2,
        attention_multiplier=0.1,
        attn_implementation="eager",
    ),
    "helium": _maker("HeliumForCausalLM", head_dim=16, pad_token_id=0),
    "hunyuan_v1_dense": _maker(
        "HunYuanDenseV1ForCausalLM", head_dim=32, rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    ),
    "hunyuan_v1_moe": _maker("HunYuanMoEV1ForCausalLM", head_dim=16, num_experts=6, moe_topk=2),
    "hyperclovax": _maker("HyperCLOVAXForCausalLM", residual_multiplier=0.4, logits_scaling=0.5),
    "internlm3": _maker("LlamaForCausalLM", model_type="internlm3", head_dim=32, attention_bias=True, mlp_bias=True),
    "iquestcoder": _maker("LlamaForCausalLM", model_type="iquestcoder", head_dim=32),
    "lfm2": _maker("Lfm2ForCausalLM", layer_types=CONVS, intermediate_size=144, block_multiple_of=32),
    "lfm2-width-bias-untied": _maker(
        "Lfm2ForCausalLM",
        layer_types=["full_attention", "conv", "conv"],
        conv_L_cache=5,
        conv_bias=True,
        tie_embedding=False,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": _maker("Lfm2MoeForCausalLM", layer_types=CONVS, num_dense_layers=1, routed_scaling_factor=1.5, **MOE),
    "mellum": _maker(
        "MellumForCausalLM",
        head_dim=16,
        sliding_window=24,
        layer_types=SLIDES,
        mlp_layer_types=["dense", "sparse", "sparse"],
        **MOE,
    ),
    "ministral3": _maker(
        "Ministral3ForCausalLM",
        head_dim=32,
        pad_token_id=0,
        rope_parameters={**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    ),
    "mistral3": _vision_maker("Mistral3ForConditionalGeneration", PIXTRAL, model_type="mistral", head_dim=32),
    "olmo": _maker("OlmoForCausalLM", pad_token_id=0),
    "qwen2_vl": _vision_maker("Qwen2VLForConditionalGeneration", {**ENCODER, "embed_dim": 32}, **MROPE),
    "qwen2_5_vl": _vision_maker("Qwen2_5_VLForConditionalGeneration", ENCODER, **MROPE),
    "qwen3_vl": _vision_maker("Qwen3VLForConditionalGeneration", ENCODER, head_dim=32, **MROPE),
    "qwen3_vl_moe": _vision_maker(
        "Qwen3VLMoeForConditionalGeneration", ENCODER, mlp_only_layers=[1], **{**MOE, **MROPE}
    ),
    "sarvam_mla": _maker(
        "DeepseekV3ForCausalLM",
        model_type="sarvam_mla",
        first_k_dense_replace=1,
        **{**LATENT, **ROUTED, "q_lora_rank": None},
    ),
    "sarvam_moe": _maker("Glm4MoeForCausalLM", model_type="sarvam_moe", head_dim=32, attention_bias=True, **ROUTED),
    "vaultgemma": _maker("VaultGemmaForCausalLM", head_dim=32, query_pre_attn_scalar=20, sliding_window=24, **GEMMA),
    "youtu": _maker("YoutuForCausalLM", **LATENT),
    "qwen3_next": _maker(
        "Qwen3NextForCausalLM", shared_expert_intermediate_size=48, mlp_only_layers=[1], **{**DELTA, **MOE}
    ),
    "qwen3_5": _maker("Qwen3_5ForCausalLM", **{**DELTA, "linear_value_head_dim": 32}),
    "qwen3_5_moe": _vision_maker(
        "Qwen3_5MoeForConditionalGeneration", ENCODER, shared_expert_intermediate_size=48, **{**DELTA, **MOE}
    ),
    "olmo_hybrid": _maker("OlmoHybridForCausalLM", pad_token_id=0, **{**DELTA, "linear_num_key_heads": 4}),
    "ministral": _maker("MinistralForCausalLM", head_dim=32, sliding_window=24, layer_types=SLIDES),
}


# The first checkpoint of each family: what tests run of a family where nothing is said of it.
FIRST_OF_FAMILY = tuple({name.partition("-")[0]: name for name in reversed(CHECKPOINTS)}.values())


def make_checkpoint(architecture: str, **options: Any) -> tuple[Any, str]:
    """A model of any class of transformers in these sizes, and how large its files may be."""
    plan = _maker(architecture, **options)()
    return plan.model_class(plan.config), plan.shard_size


def save_checkpoint(name: str, folder: Path, **changes: Any) -> None:
    """Writes the named checkpoint; its weights are the same in every run, and no norm or bias is trivial.

    `changes`: of config.json.
    """
    if changes:
        _make_checkpoint(name, folder, **changes)
    else:
        shutil.copytree(_made(name).name, folder, dirs_exist_ok=True)


@cache
def _made(name: str) -> tempfile.TemporaryDirectory[str]:
    """The checkpoint as it is, made once in a session."""
    made = tempfile.TemporaryDirectory(prefix="minisgl-checkpoint-")
    _make_checkpoint(name, Path(made.name))
    return made


def _make_checkpoint(name: str, folder: Path, **changes: Any) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))  # of its name alone: another checkpoint changes nothing
    plan = CHECKPOINTS[name](**changes)
    model = plan.model_class(plan.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                values.copy_(torch.randn_like(values) * 0.2)
            elif name.endswith("A_log"):  # what came long ago counts: decays of 0.6 to 0.99 a token
                values.uniform_(-5, -1)
            elif name.endswith("_proj_bias"):  # of all experts
                values.copy_(torch.randn_like(values))
    model.save_pretrained(folder, max_shard_size=plan.shard_size)


def reference_model(folder: Path) -> Any:
    """The same checkpoint in transformers, float32."""
    (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
    has_encoder = architecture.endswith("ForConditionalGeneration")
    model_class: Any = transformers.AutoModelForImageTextToText if has_encoder else transformers.AutoModelForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    # As of transformers 5.24 its forward asks the text model for what only models of images return.
    return model.language_model if architecture == "Llama4ForConditionalGeneration" else model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of VOCAB_SIZE words, for callers that insist on one."""
    vocabulary = {f"w{i} ": i for i in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0 "))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0 ").save_pretrained(folder)
