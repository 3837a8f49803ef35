"""LFM2 with mixtures of experts behind the first layers."""

from minisgl_backend.layers.config import DenseMlpConfig, MlpConfig, MoeConfig, RouterConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, Stored, TensorNames, refuse
from minisgl_backend.models.families.common import expert_counts, layer_types
from minisgl_backend.models.families.lfm2 import CONV, DEFAULTS, NAMES, hybrid


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    types = layer_types(keys, num_layers, allowed=(FULL, CONV))
    if not types:
        refuse("layer_types", None, f"one of {FULL}, {CONV} for each of the {num_layers} layers")
    num_dense = min(keys.integer("num_dense_layers", 2, least=0), num_layers)
    dense = MlpConfig(intermediate_size=keys.integer("intermediate_size"))
    num_experts, experts_per_token = expert_counts(keys, "num_experts", 32, per_token=4)
    mixture = MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        router=RouterConfig(
            scores="sigmoid",
            renormalize=keys.boolean("norm_topk_prob", True),
            correction_bias=keys.boolean("use_expert_bias", True),
            scaling=keys.number("routed_scaling_factor", 1.0),
        ),
    )
    mlps: list[DenseMlpConfig | MoeConfig] = [dense if layer < num_dense else mixture for layer in range(num_layers)]
    return hybrid(keys, types, mlps)


FAMILY = Family(
    model_type="lfm2_moe",
    read=read,
    defaults={
        **DEFAULTS,
        **{"hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 65_536},
        **{"intermediate_size": 7168, "moe_intermediate_size": 1792},
    },
    tensor_names=TensorNames(
        stored=(
            *NAMES,
            Stored(name="feed_forward.expert_bias", of=("mlp.gate.e_score_correction_bias",)),
            Stored(name="feed_forward.gate", of=("mlp.gate",)),
            Stored(name="feed_forward.experts.{expert}.w1", of=("mlp.experts.gate_proj",)),
            Stored(name="feed_forward.experts.{expert}.w3", of=("mlp.experts.up_proj",)),
            Stored(name="feed_forward.experts.{expert}.w2", of=("mlp.experts.down_proj",)),
        )
    ),
)
