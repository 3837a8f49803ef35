"""AFM (Arcee): Llama with an MLP without a gate, whose activation is relu(x) ** 2."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import llama_attention, norm, ungated_mlp, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        llama_attention(keys),
        ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", False)),
        norm(keys, eps=1e-5),
    )


FAMILY = Family(model_type="arcee", read=read)
