"""The config of a model, read from its folder: what it computes, its context, end tokens, sampling defaults.

The only reader of config.json and generation_config.json; needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.encoder_config import EncoderConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.end_tokens import end_tokens, read_end_of_text, token_ids
from minisgl_backend.models.eyes import with_normalisation
from minisgl_backend.models.families import FAMILIES
from minisgl_backend.models.families.base import Family
from minisgl_backend.models.families.vectors import find_family
from minisgl_backend.models.generation import GenerationDefaults
from minisgl_backend.models.json_files import read_json
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.models.known_keys import check_model_type, check_unread, default_sizes
from minisgl_backend.models.pooling import EmbeddingDefaults, ScoreDefaults
from minisgl_backend.models.quantization_files import CONFIG_KEYS, find_quantization
from minisgl_backend.number_formats import DTYPES
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.names import TensorNames

# Keys that a multimodal config may have outside of its text config.
_AROUND_TEXT = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")

# In formats of publishers' own code, and the name of transformers' format of the same weights.
PUBLISHED_ALSO: Mapping[Any, str] = MappingProxyType(
    {
        "InternVLChatModel": "InternVLForConditionalGeneration, published under names that end in -hf",
        "LlavaLlamaForCausalLM": "LlavaForConditionalGeneration or LlavaNext..., as llava-hf has it",
        "LlavaMistralForCausalLM": "LlavaNextForConditionalGeneration, as llava-hf has it",
        "LlavaQwenForCausalLM": "LlavaOnevisionForConditionalGeneration, as llava-hf has it",
    }
)

_NOT_LOADED = "encoder_cache_mib is 0"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """One model, checked: an instance exists only for what this engine computes correctly."""

    architecture: str
    implementation: str = "native"  # or "transformers": its classes run the model
    dtype: str  # float32, float16 or bfloat16: the dtype of the checkpoint
    eos_token_ids: tuple[int, ...]  # from config.json, generation_config.json and the tokenizer
    bos_token_id: int | None
    generation: GenerationDefaults
    tensor_names: TensorNames  # in its checkpoints
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)  # formats of its weights
    embedding: EmbeddingDefaults = field(default_factory=EmbeddingDefaults)
    scores: ScoreDefaults = field(default_factory=ScoreDefaults)
    encoder: EncoderConfig | None = None  # of images; None: it reads text alone
    why_no_images: str = ""  # where its config.json has an encoder even so
    unknown_keys: tuple[str, ...] = ()  # of config.json, which neither this engine nor the class in transformers reads

    @classmethod
    def load(cls, model_dir: str | Path) -> ModelConfig:
        """Reads a model folder. Raises ConfigError naming file, key, value and what is allowed."""
        folder = Path(model_dir)
        if (folder / "adapter_config.json").exists():
            raise ConfigError(
                f"{folder} holds a LoRA adapter (adapter_config.json), which is no model; serve its base model with "
                f"--adapters NAME={folder}"
            )
        config = read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        model = cls.from_dicts(config, generation, read_end_of_text(folder), folder)
        if model.encoder is not None:
            encoder, why_no_images = with_normalisation(model.encoder, folder)
            model = replace(model, encoder=encoder, why_no_images=why_no_images)
        return replace(model, embedding=EmbeddingDefaults.load(folder), scores=ScoreDefaults.load(folder))

    @classmethod
    def from_dicts(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        tokenizer_eos: int | None = None,
        folder: Path | None = None,
    ) -> ModelConfig:
        """From the contents of config.json and generation_config.json ({} where the model has none).

        `tokenizer_eos`: the token with which the tokenizer ends a text. `folder`: of the model, for files that say how
        it is quantized.
        """
        check_decoder(config)
        quantization = find_quantization(config, folder)
        architecture, family = _architecture(config)
        check_model_type(config.get("model_type"), architecture, family.model_type)
        around, config = Keys(config), _of_text(config, family)
        family, sizes = _with_text(family, config)
        keys = Keys(config, {**sizes, **family.defaults})

        for key in CONFIG_KEYS:  # which `find_quantization` reads
            keys.get(key)
        keys.without_effect("is_encoder_decoder")
        keys.choice("is_causal", (True,))  # False in embedding models with bidirectional attention
        decoder = family.read(keys)
        decoder.check()
        names = family.names_of(decoder)
        encoder, why_no_images = read_encoder(family, around, decoder)
        return cls(
            **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
            architecture=architecture,
            dtype=keys.choice("dtype" if keys.get("dtype") else "torch_dtype", DTYPES),
            eos_token_ids=end_tokens(config, generation, tokenizer_eos, decoder.vocab_size),
            bos_token_id=next(iter(token_ids("config.json: bos_token_id", config.get("bos_token_id"))), None),
            generation=GenerationDefaults.read(generation),
            tensor_names=names,
            quantization=QuantizationConfig(names=names) if quantization is None else quantization.read(names),
            encoder=encoder,
            why_no_images=why_no_images,
            unknown_keys=check_unread(keys, family.model_type, decoder.max_position),
        )

    def reading(self, images: bool) -> ModelConfig:
        """The same, without its encoder where it is to read text alone."""
        return self if images or self.encoder is None else replace(self, encoder=None, why_no_images=_NOT_LOADED)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError unless the model splits over `size` ranks."""
        if self.implementation != "native" and size > 1:
            raise ConfigError(
                f"tp is {size}; allowed: 1 for {self.architecture}, which runs through transformers' code (model_impl)"
            )
        super().check_tensor_parallel(size)

    def max_seq_len(self, override: int | None = None) -> int:
        """The longest sequence, prompt and output, in tokens; `override` is the option max_seq_len_override.

        Raises ConfigError for more than the model supports.
        """
        if override is not None and override > self.max_position:
            raise ConfigError(
                f"max_seq_len_override is {override}; allowed: 2 to {self.max_position}, the longest sequence that the "
                "model's config.json provides for"
            )
        return override or self.default_length or self.max_position


def read_encoder(family: Family, around: Keys, decoder: DecoderConfig) -> tuple[EncoderConfig | None, str]:
    """The encoder of images, and why there is none where config.json has one: its text is served even so."""
    if not around.get("vision_config"):
        return None, ""
    if family.encoder is None:
        return None, f"the encoder of {family.model_type} is not computed"
    try:
        return family.encoder(around, decoder), ""
    except ConfigError as error:
        return None, str(error)


def check_decoder(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for an encoder-decoder."""
    if config.get("is_encoder_decoder"):
        refuse("is_encoder_decoder", config["is_encoder_decoder"], "false: only decoders are served")


def _architecture(config: Mapping[str, Any]) -> tuple[str, Family]:
    names = config.get("architectures") or _architectures_of(config.get("model_type"))
    if not isinstance(names, list):
        refuse("architectures", names, "a list of one name")
    family = find_family(str(names[0]), config.get("model_type"), FAMILIES) if len(names) == 1 else None
    if family is None and len(names) == 1 and (own := PUBLISHED_ALSO.get(names[0])):
        refuse("architectures", names, f"the same model in transformers' format, {own}")
    if family is None:
        nearest = _nearest(str(names[0])) if names else []
        like = f"like {', '.join(nearest)}; " if nearest else ""
        refuse("architectures", names, f"one of the {len(FAMILIES)} native families, {like}docs/models.md lists them")
    return str(names[0]), family


def _with_text(family: Family, text: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """With the family of its text model, where it is another one; and the sizes that such configs omit where they are
    transformers' defaults."""
    if not family.texts:
        return family, {}
    model_type = text.get("model_type") or next(iter(family.texts))
    if model_type not in family.texts:
        refuse("text_config.model_type", model_type, ", ".join(family.texts))
    return family.around(FAMILIES[family.texts[model_type]]), default_sizes(model_type)


def _nearest(architecture: str) -> list[str]:
    """Alike in front of "For", too: nearly all share what comes from there on."""
    stems = {name: name.partition("For")[0] for name in get_close_matches(architecture, FAMILIES, n=9)}
    close = get_close_matches(architecture.partition("For")[0], stems.values(), n=9, cutoff=0.7)
    return [name for name, stem in stems.items() if stem in close][:3]


def _architectures_of(model_type: Any) -> list[str]:
    """Of a config.json without `architectures`, as transformers chooses: by the type."""
    generating = (name for name in FAMILIES if name.endswith("ForCausalLM"))
    return [name for name in generating if model_type and FAMILIES[name].model_type == model_type][:1]


def _of_text(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The text model's config, with the keys of the outer config that apply to it."""
    key = family.text_config
    if key is None or (family.may_be_flat and key not in config):
        return config
    inner = config.get(key)
    if not isinstance(inner, dict):
        refuse(key, inner, "a JSON object, which describes the text model")
    ties = any(of.get("tie_word_embeddings") for of in (config, inner))  # transformers 5: outer config, 4: inner
    return {
        **{name: config[name] for name in _AROUND_TEXT if name in config},
        **inner,
        **({"tie_word_embeddings": True} if ties else {}),
    }
