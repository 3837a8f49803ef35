"""VaultGemma: Gemma 2 with norms before attention and MLP only."""

from minisgl_backend.models.families import gemma2
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    return gemma2.read(keys).with_layers(norms="before")


FAMILY = Family(
    model_type="vaultgemma",
    read=read,
    defaults=gemma2.FAMILY.defaults,
    tensor_names=TensorNames(stored=(Stored(name="pre_feedforward_layernorm", of=("post_attention_layernorm",)),)),
)
