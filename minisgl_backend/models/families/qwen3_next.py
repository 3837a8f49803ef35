"""Qwen3-Next: the gated delta rule in three of four layers, and attention with a gate, whose heads are rotated in part;
experts, and a shared one with a gate."""

from dataclasses import replace

from minisgl_backend.layers.config import DenseMlpConfig, LayerConfig, MoeConfig
from minisgl_backend.layers.mixer_config import GatedAttentionConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, Stored, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, decoder, mlp, norm
from minisgl_backend.models.families.delta import (
    CONVOLUTION,
    gated_delta,
    gated_queries,
    hybrid_types,
    shared_experts,
)
from minisgl_backend.models.families.qwen3_moe import sparse_layers
from minisgl_backend.models.rope import MRope


def read(keys: Keys) -> DecoderConfig:
    dense, mixture = mlp(keys), shared_experts(keys)
    return hybrid(keys, [mixture if is_sparse else dense for is_sparse in sparse_layers(keys)])


def hybrid(keys: Keys, mlps: list[DenseMlpConfig | MoeConfig], *, mrope: MRope | None = None) -> DecoderConfig:
    """Mixers by layer_types around these MLPs; `mrope`: see `read_rope`."""
    keys.choice("attn_output_gate", (True,), True)
    keys.choice("output_gate_type", ("swish", "silu"), "swish")  # of the gated delta rule
    keys.without_effect("mamba_ssm_dtype")  # states are float32
    # The first layer that drafts, which files of Qwen3-Next have and do not tell. One with an embedding of its own is
    # not served.
    drafts = keys.integer("mtp_num_hidden_layers", 1, least=0) and not keys.boolean(
        "mtp_use_dedicated_embeddings", False
    )
    around = norm(keys, weight_offset=1.0)
    head_dim, bias = keys.integer("head_dim", 256), keys.boolean("attention_bias", False)
    full = attention(
        keys,
        GatedAttentionConfig,
        head_dim=head_dim,
        rope=read_rope(keys, head_dim, partial=True, part=0.25, mrope=mrope),
        bias=bias,
        qk_norm=around,
    )
    linear = gated_delta(keys, replace(around, weight_offset=0.0))
    types = hybrid_types(keys)
    mixers = [full if kind == FULL else linear for kind in types]
    layers = [LayerConfig(mixer=mixer, mlp=one, norm=around) for mixer, one in zip(mixers, mlps, strict=True)]
    return decoder(keys, layers, num_draft_layers=int(drafts))


# In GGUF files, and in those of Qwen3.5.
FUSED = Stored(
    name="linear_attn.in_proj_qkv", of=tuple(f"linear_attn.in_proj_{kind}" for kind in "qkv"), may_be_absent=True
)


def _grouped(decoder: DecoderConfig) -> tuple[Stored, ...]:
    """By key head: its query, key, values and their z; b and a of its value heads."""
    num_k_heads = next(one.num_k_heads for layer in decoder.layers if (one := layer.mixer.state) is not None)
    return (
        gated_queries(decoder),
        *(
            Stored(
                name=f"linear_attn.in_proj_{kinds}",
                of=tuple(f"linear_attn.in_proj_{kind}" for kind in kinds),
                groups=num_k_heads,
                may_be_absent=True,
            )
            for kinds in ("qkvz", "ba")
        ),
        FUSED,
    )


DRAFT_NAMES = (
    ("mtp.layers.0.", ""),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.fc.", "eh_proj."),
    ("mtp.norm.", "shared_head.norm."),
)

FAMILY = Family(
    model_type="qwen3_next",
    read=read,
    defaults={"norm_topk_prob": True},
    tensor_names=TensorNames(stored=(CONVOLUTION,), left_out=("mtp.",)),
    grouped=_grouped,
    draft_names=DRAFT_NAMES,
)
