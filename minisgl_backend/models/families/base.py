"""What a family's file is written in, besides layers: keys of config.json, ropes, names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minisgl_backend.layers.encoder_config import EncoderConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.keys import Keys, is_positive, refuse
from minisgl_backend.models.rope import by_layer_type, make_rope, max_positions, read_rope
from minisgl_backend.weights.names import MERGED_EXPERTS, SHARED_EXPERTS, Stored, TensorNames

__all__ = [
    "FULL",
    "LINEAR",
    "MERGED_EXPERTS",
    "SHARED_EXPERTS",
    "SLIDING",
    "DecoderConfig",
    "Family",
    "Keys",
    "Stored",
    "TensorNames",
    "by_layer_type",
    "is_positive",
    "make_rope",
    "max_positions",
    "read_rope",
    "refuse",
]

# Entries of layer_types.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. `read` reads every key that changes what is computed, and refuses unsupported values;
    `known_keys.check_unread` checks the keys that it does not read."""

    model_type: str  # its name in transformers
    read: Callable[[Keys], DecoderConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' defaults of keys that its configs omit
    text_config: str | None = None  # key of the text model's config inside config.json; None: config.json itself
    may_be_flat: bool = False  # older configs have no `text_config`, but its keys at the top level
    tensor_names: TensorNames = field(default_factory=TensorNames)
    # Of a model around another family's decoder: that family's architecture, by the `model_type` in `text_config`; the
    # first is that of an absent one.
    texts: Mapping[str, str] = field(default_factory=dict)
    # Of images, from config.json around the text model's and from the decoder; None: it has none, or one that is not
    # computed. Raises ConfigError for what is not.
    encoder: Callable[[Keys, DecoderConfig], EncoderConfig] | None = None
    # What is stored in groups, whose number the model's config has: beside those of `tensor_names`.
    grouped: Callable[[DecoderConfig], tuple[Stored, ...]] | None = None

    # What names of its draft layer begin with in checkpoints, and here behind that layer's prefix (`models.mtp`).
    draft_names: tuple[tuple[str, str], ...] = ()

    def around(self, inner: Family) -> Family:
        """With the decoder of another family, whose names come behind this one's. In transformers the output projection
        is that of the whole model, which knows no multiplier."""
        own, names = self.tensor_names, inner.tensor_names
        return replace(
            inner,
            read=lambda keys: replace(inner.read(keys), logits_multiplier=1.0),
            text_config=self.text_config,
            encoder=self.encoder,
            tensor_names=replace(
                names, prefixes=(*own.prefixes, *names.prefixes), left_out=(*own.left_out, *names.left_out)
            ),
        )

    def names_of(self, decoder: DecoderConfig) -> TensorNames:
        """Those of one model's checkpoints, without its draft layers."""
        names = self.tensor_names
        stored = () if self.grouped is None else self.grouped(decoder)
        drafts = [(theirs, prefix + own) for prefix in decoder.draft_prefixes[:1] for theirs, own in self.draft_names]
        return replace(
            names,
            stored=(*names.stored, *stored),
            prefixes=(*drafts, *names.prefixes),
            left_out=(*names.left_out, *decoder.draft_prefixes),
        )
