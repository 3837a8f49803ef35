"""DeepSeek-V3 and R1, and models of the same architecture such as Kimi-K2: latent attention (MLA), sigmoid routing.

DeepSeek-AI, 2024: DeepSeek-V3 Technical Report.
"""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames
from minisgl_backend.models.families.common import decoder, mlps, norm
from minisgl_backend.models.families.deepseek_v2 import SIZES, latent_attention


def read(keys: Keys) -> DecoderConfig:
    keys.choice("moe_layer_freq", (1,))
    keys.without_effect("aux_loss_alpha", "ep_size", "seq_aux")  # for training, and for the authors' own serving code
    attention = latent_attention(keys, interleaved=keys.boolean("rope_interleave", True))
    layers = [LayerConfig(mixer=attention, mlp=one, norm=norm(keys)) for one in mlps(keys, dense=3)]
    drafts = keys.integer("num_nextn_predict_layers", 1, least=0)
    keys.without_effect("num_mtp_layers")  # the same, as transformers names it
    return decoder(keys, layers, num_draft_layers=drafts)


FAMILY = Family(
    model_type="deepseek_v3",
    read=read,
    defaults={
        **SIZES,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
