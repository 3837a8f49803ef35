"""ERNIE 4.5 with experts, chosen by a softmax with a correction bias."""

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import activation, attention, decoder, expert_counts, head_size, mlp, norm
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import SHARED_EXPERTS, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_bias", (False,))
    num_layers = keys.integer("num_hidden_layers")
    start, last = keys.integer("moe_layer_start_index", 1, least=0), keys.get("moe_layer_end_index", -1)
    if not isinstance(last, int) or isinstance(last, bool) or last < -1:
        refuse("moe_layer_end_index", last, "the index of a layer, or -1 for the last one")
    last = num_layers - 1 if last == -1 else last
    interval = keys.integer("moe_layer_interval", 1)
    head_dim = head_size(keys)
    heads = attention(keys, num_kv_heads=4, rope=read_rope(keys, head_dim, interleaved=True))
    dense, mixture = mlp(keys), _mixture(keys)
    has_experts = [start <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers)]
    # MTP layers are stored apart from the others: see `left_out`.
    keys.without_effect("num_nextn_predict_layers")
    norms = norm(keys, eps=1e-5)
    return decoder(keys, [LayerConfig(mixer=heads, mlp=mixture if one else dense, norm=norms) for one in has_experts])


def _mixture(keys: Keys) -> MoeConfig:
    num_experts, experts_per_token = expert_counts(keys, "moe_num_experts", 64, "moe_k", 6)
    least = keys.number("moe_norm_min", 1e-12)
    if least > experts_per_token / num_experts:  # otherwise the best weights always add up to more
        refuse("moe_norm_min", least, f"a number up to moe_k / moe_num_experts ({experts_per_token / num_experts})")
    size = keys.integer("moe_intermediate_size", 1536)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=size,
        activation=activation(keys),
        router=RouterConfig(correction_bias=True, in_float32=True),
        shared_intermediate_size=size * keys.integer("moe_num_shared_experts", 2, least=0),
    )


FAMILY = Family(
    model_type="ernie4_5_moe",
    read=read,
    defaults={"tie_word_embeddings": True, "rope_theta": 500_000.0},
    tensor_names=TensorNames(
        stored=(
            *SHARED_EXPERTS,
            Stored(
                name="mlp.moe_statics.e_score_correction_bias", of=("mlp.gate.e_score_correction_bias",), one_row=True
            ),
        ),
        left_out=("model.mtp_",),
    ),
)
