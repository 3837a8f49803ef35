"""Checkpoints of the families that do not generate: sequence classifiers, and models without an output projection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl_backend.models.families import Families
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, TensorNames

_CAUSAL, _CLASSIFIER, _BASE = "ForCausalLM", "ForSequenceClassification", "Model"
_BASE_NAMES = TensorNames(prefixes=tuple((f"{name}.", f"model.{name}.") for name in ("layers", "embed_tokens", "norm")))


def find_family(architecture: str, model_type: Any, families: Families) -> Family | None:
    """The family with this name in config.json's `architectures`, or one derived from that of ...ForCausalLM. Where
    transformers runs several types with one class, `model_type` decides."""
    for one in families.run_as(architecture):
        if one.model_type == model_type:
            return one
    if architecture == "LLaMAForCausalLM":  # in the first conversions
        architecture = "LlamaForCausalLM"
    if architecture in families:
        return families[architecture]
    for suffix, variant in ((_CLASSIFIER, _classifier), (_BASE, _base_model)):
        if architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix).removesuffix("Text")  # Gemma 3's
            family = families.get(stem + _CAUSAL)
            return None if family is None else variant(family)
    return None


def _classifier(family: Family) -> Family:
    """`score` replaces the output projection: transformers' GenericForSequenceClassification."""

    def read(keys: Keys) -> DecoderConfig:
        labels = keys.mapping("id2label") or {"0": "", "1": ""}
        num_labels = keys.integer("num_labels", len(labels))
        return replace(family.read(keys), num_labels=num_labels, generates=False)

    return replace(family, read=read)


def _base_model(family: Family) -> Family:
    """Ends with the final norm; tensor names in its checkpoints have no "model." prefix."""

    def read(keys: Keys) -> DecoderConfig:
        return replace(family.read(keys), generates=False)

    names = family.tensor_names
    return replace(family, read=read, tensor_names=replace(names, prefixes=(*names.prefixes, *_BASE_NAMES.prefixes)))
