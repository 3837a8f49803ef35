"""IQuest-Coder: Llama."""

from minisgl_backend.models.families import llama
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_sliding_window", (False,))
    keys.without_effect("sliding_window", "max_window_layers")
    return llama.read(keys)


FAMILY = Family(
    model_type="iquestcoder", read=read, defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
)
