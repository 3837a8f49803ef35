"""gpt-oss: attention sinks, a window in every second layer, experts with biases and a clamped activation."""

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import attention, decoder, every, expert_counts, layer_types, norm, window


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    types = layer_types(keys, num_layers) or every(2, num_layers)
    size, bias = window(keys, 128), keys.boolean("attention_bias", True)

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(
            mixer=attention(
                keys, qkv_bias=bias, output_bias=bias, window=size if kind == SLIDING else None, sinks=True
            ),
            mlp=mixture,
            norm=norm(keys, eps=1e-5),
        )

    mixture = _mixture(keys)
    keys.without_effect("initial_context_length")  # the rope's values have it, too
    return decoder(keys, [layer(kind) for kind in types])


def _mixture(keys: Keys) -> MoeConfig:
    num_experts, experts_per_token = expert_counts(keys, "num_local_experts", 128, per_token=4)
    keys.choice("experts_per_token", (experts_per_token,))  # the same number again
    keys.choice("hidden_act", ("silu",))
    keys.choice("swiglu_alpha", (1.702,))
    keys.choice("swiglu_limit", (7.0,))
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer("intermediate_size"),
        activation="swiglu_oai",
        bias=True,
        router=RouterConfig(bias=True),  # a softmax over the best logits only
    )


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts(kind: str, stored: str) -> Stored:
    """Gate and up of all experts are in one tensor with alternating outputs."""
    of = tuple(f"mlp.experts.{name}_proj.{kind}" for name in ("gate", "up"))
    return Stored(name=stored, of=of, interleaved=True, transposed=kind == "weight")


# As published, in MXFP4: rows of gate and up alternate, and stay so.
_MXFP4 = tuple(
    Stored(name=f"mlp.experts.{name}_proj_{kind}", of=(f"mlp.experts.{name}_proj.{kind}",))
    for name, kinds in (("gate_up", ("blocks", "scales", "bias")), ("down", ("blocks", "scales")))
    for kind in kinds
)


FAMILY = Family(
    model_type="gpt_oss",
    read=read,
    defaults={"head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150_000.0, "rope_parameters": _ROPE},
    tensor_names=TensorNames(
        stored=(
            Stored(name="mlp.router", of=("mlp.gate",)),
            _experts("weight", "mlp.experts.gate_up_proj"),
            _experts("bias", "mlp.experts.gate_up_proj_bias"),
            Stored(name="mlp.experts.down_proj", of=("mlp.experts.down_proj.weight",), transposed=True),
            Stored(name="mlp.experts.down_proj_bias", of=("mlp.experts.down_proj.bias",)),
            *_MXFP4,
        )
    ),
)
