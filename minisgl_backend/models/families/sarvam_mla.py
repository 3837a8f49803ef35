"""Sarvam 105B: DeepSeek-V3 with other names."""

from minisgl_backend.models.families import deepseek_v3
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames


def read(keys: Keys) -> DecoderConfig:
    return deepseek_v3.read(keys)


FAMILY = Family(
    model_type="sarvam_mla",
    read=read,
    defaults={
        **deepseek_v3.FAMILY.defaults,
        "q_lora_rank": None,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
