"""The config of an EAGLE-3 head (Li et al., 2025), read from its folder: a one-layer model that drafts for another one.

It reads three of the target's hidden states and the embedding of the next token. The layout is that of published heads:
config.json with Llama's keys and `draft_vocab_size`. Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families.common import attention, decoder, mlp, norm
from minisgl_backend.models.generation import GenerationDefaults
from minisgl_backend.models.json_files import read_json
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.models.known_keys import check_unread
from minisgl_backend.number_formats import DTYPES
from minisgl_backend.weights.names import TensorNames

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_STATES = 3  # hidden states of the target
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NAMES = TensorNames(
    prefixes=(
        ("model.layers.0.", "midlayer."),
        ("layers.0.", "midlayer."),
        ("model.", ""),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModelConfig):
    """A head. `vocab_size` is the target's; `layers` has the one layer, whose queries, keys and values are computed
    from the concatenated embedding and hidden state."""

    draft_vocab_size: int  # number of tokens that it can draft
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None  # as in `AuxStates`; None: those that published heads are trained on
    norm_before_residual: bool  # the residual stream starts from the normed hidden state

    @classmethod
    def load(cls, model_dir: str | Path) -> Eagle3Config:
        """Reads a head's folder. Raises ConfigError naming key, value and what is allowed."""
        return cls.from_config(read_json(Path(model_dir) / "config.json"))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """From the contents of config.json."""
        keys = Keys(config, {"max_position_embeddings": 2048})
        names = config.get("architectures") or []
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            refuse("architectures", names, f"one of {', '.join(ARCHITECTURES)} for the method eagle3")
        keys.choice("model_type", ("llama",))
        num_layers = keys.integer("num_hidden_layers", 1)
        if num_layers != 1:
            refuse("num_hidden_layers", num_layers, "1")
        keys.choice("quantization_config", (None,))
        keys.choice("tie_word_embeddings", (False,))
        bias = keys.boolean("attention_bias", False)
        own = keys.mapping("eagle_config")
        if own.get("use_aux_hidden_state", True) is not True:
            refuse("eagle_config", dict(own), "use_aux_hidden_state true: heads that read one state are not EAGLE-3's")
        layer = LayerConfig(
            mixer=attention(keys, num_kv_heads=keys.integer("num_attention_heads"), qkv_bias=bias, output_bias=bias),
            mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
            norm=norm(keys),
        )
        description = decoder(keys, [layer])
        description.check()
        hidden_size, vocab_size = description.hidden_size, description.vocab_size
        draft_vocab_size = keys.integer("draft_vocab_size", vocab_size)
        if draft_vocab_size > vocab_size:
            refuse("draft_vocab_size", draft_vocab_size, f"1 to {vocab_size}, which is vocab_size")
        return cls(
            **{field.name: getattr(description, field.name) for field in fields(description)},
            architecture=str(names[0]),
            dtype=keys.choice("dtype" if keys.get("dtype") else "torch_dtype", DTYPES),
            eos_token_ids=(),
            bos_token_id=None,
            generation=GenerationDefaults.read({}),
            tensor_names=_NAMES,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=keys.integer("target_hidden_size", hidden_size),
            aux_layers=_aux_layers(keys, own),
            norm_before_residual=keys.boolean("norm_before_residual", False),
            unknown_keys=check_unread(keys, "llama", description.max_position),
        )

    def states_of(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers whose inputs it reads. Raises ConfigError where the head is for another target."""
        if target.implementation != "native":
            raise ConfigError(
                f"{target.architecture} runs through transformers' code (model_impl), which tells no hidden states; "
                "allowed with the method eagle3: models of the native families"
            )
        if target.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"the head reads hidden states of {self.target_hidden_size} numbers (hidden_size or "
                f"target_hidden_size of its config.json); allowed: {target.hidden_size}, the target's hidden_size"
            )
        if target.vocab_size != self.vocab_size:
            raise ConfigError(
                f"the head's vocab_size is {self.vocab_size}; allowed: {target.vocab_size}, the target's vocab_size"
            )
        num_layers = target.num_layers
        layers = self.aux_layers
        if layers is None:
            layers = (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))
        if max(layers) >= num_layers:
            raise ConfigError(
                f"the head's {_LAYER_IDS} are {list(layers)}; allowed: 0 to {num_layers - 1}, layers of the target"
            )
        return layers


def _aux_layers(keys: Keys, own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """At the top level an id names the layer whose input the hidden state is, as in vLLM; in eagle_config the layer
    whose output it is, as in SGLang."""
    given = keys.get(_LAYER_IDS)
    ids, offset = (own.get(_LAYER_IDS), 1) if given is None else (given, 0)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != NUM_STATES or not all(_is_layer(one) for one in ids):
        refuse(_LAYER_IDS, ids, f"{NUM_STATES} layers of the target, each 0 or more")
    return tuple(one + offset for one in ids)


def _is_layer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
