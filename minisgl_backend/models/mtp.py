"""Config of MTP layers: layers after a checkpoint's last one, which draft (multi-token prediction; DeepSeek-AI, 2024:
DeepSeek-V3 Technical Report, section 2.2).

The layout is that of DeepSeek-V3, also used by GLM-4.5 and GLM-4.7-Flash: `num_nextn_predict_layers` layers, numbered
after the model's own. Others have the same under other names (`Family.draft_names`).

Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields, replace

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.weights.formats import QuantizationConfig

_ALLOWED = "a checkpoint with such layers, in the layout of DeepSeek-V3, GLM-4.5 or Qwen3-Next, or another method"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(ModelConfig):
    """The first MTP layer, as a model of one layer; it is applied again for each further draft.

    Its embedding and its output projection are the model's: copies that are stored with it are not read.
    """

    prefix: str  # of its tensors' names

    @classmethod
    def of(cls, model: ModelConfig, quantization: QuantizationConfig) -> MtpConfig:
        """The MTP layer of a model's checkpoint. Raises ConfigError where there is none."""
        if model.implementation != "native":
            raise ConfigError(
                f"{model.architecture} runs through transformers' code (model_impl), which tells no hidden states; "
                "allowed with the method mtp: models of the native families"
            )
        if not model.num_draft_layers:
            raise ConfigError(
                f"{model.architecture} has no layers that predict further tokens, as its config.json is read (0 "
                f"num_nextn_predict_layers); allowed: {_ALLOWED}"
            )
        prefix = model.draft_prefixes[0]
        shared = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")
        own = {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
        own |= {"layers": (model.draft_layer,), "num_draft_layers": 0, "num_labels": 0, "quantization": quantization}
        own["tensor_names"] = replace(model.tensor_names, within=prefix, left_out=shared)
        return cls(**own, prefix=prefix)

    def check_stored(self, names: Set[str]) -> None:
        """Raises ConfigError where a checkpoint with tensors of these names lacks the layer: some are published without
        it despite their config.json."""
        if (needed := f"{self.prefix}eh_proj.weight") not in names:
            raise ConfigError(
                f"the checkpoint lacks {needed}, of the layer that predicts further tokens; allowed: {_ALLOWED}"
            )
