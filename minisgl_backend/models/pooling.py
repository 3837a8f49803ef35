"""How a checkpoint makes embeddings and scores: read from the files of sentence-transformers, where it has them.

modules.json lists the modules in order: a Transformer, a Pooling (the config.json in its folder has the kind) and
possibly a Normalize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.json_files import read_json, read_json_if_there, read_json_list
from minisgl_backend.request import PoolingKind

_MODULES = "modules.json"
_SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
_ACTIVATIONS = {"Sigmoid": False, "Identity": True}  # of torch.nn: whether scores are raw
_KINDS: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {  # keys of sentence-transformers before 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class EmbeddingDefaults:
    """Defaults of a model's embeddings, unless a request has others."""

    kind: PoolingKind = "last"
    normalize: bool = True
    is_embedding_model: bool = False  # its files define embeddings
    not_served: str = ""  # why its embeddings are not served: they would differ from what its files define

    @classmethod
    def load(cls, folder: Path) -> EmbeddingDefaults:
        """From the files of a model folder; default: the last token's hidden state, normalized."""
        if not (folder / _MODULES).exists():
            return cls()
        try:
            return cls._of_modules(folder, read_json_list(folder / _MODULES))
        except ConfigError as error:
            return cls(not_served=str(error))

    @classmethod
    def _of_modules(cls, folder: Path, modules: Sequence[Any]) -> EmbeddingDefaults:
        kind: PoolingKind = "mean"
        normalize = False
        for module in modules:
            kind_of_module = _module_kind(module)
            if kind_of_module == "Pooling":
                path = folder / str(module.get("path", "")) / "config.json"
                kind = _kind(path, read_json(path))
            elif kind_of_module == "Normalize":
                normalize = True
            elif kind_of_module != "Transformer":
                raise ConfigError(
                    f"{folder / _MODULES} has a module {module!r:.100}; allowed: Transformer, Pooling, Normalize"
                )
        return cls(kind=kind, normalize=normalize, is_embedding_model=True)


@dataclass(frozen=True, kw_only=True)
class ScoreDefaults:
    """What a reranker's scores are, unless a request has others."""

    raw: bool = False  # as the head has them; else the logistic function of that
    not_served: str = ""  # why they are not served: they would differ from what its files define

    @classmethod
    def load(cls, folder: Path) -> ScoreDefaults:
        """From the files of a model folder. Raises ConfigError for a file that is no JSON object."""
        config = read_json_if_there(folder / "config.json")
        own = read_json_if_there(folder / _SENTENCE_TRANSFORMERS)
        section = config.get("sentence_transformers")
        places = {
            f"{_SENTENCE_TRANSFORMERS}: activation_fn": own.get("activation_fn"),
            "config.json: sentence_transformers.activation_fn": (
                section.get("activation_fn") if isinstance(section, Mapping) else section
            ),
            "config.json: sbert_ce_default_activation_function": config.get("sbert_ce_default_activation_function"),
        }
        if own.get("model_type") == "CrossEncoder" and (folder / _MODULES).exists():
            for module in read_json_list(folder / _MODULES):
                if _module_kind(module) not in ("Transformer", "LogitScore"):
                    said = f"{folder / _MODULES} has a module {module!r:.100}; allowed: Transformer, LogitScore"
                    return cls(not_served=said)
        for place, name in places.items():
            if name is not None:
                package, _, function = str(name).rpartition(".")
                if function in _ACTIVATIONS and (not package or f"{package}.".startswith("torch.nn.")):
                    return cls(raw=_ACTIVATIONS[function])
                allowed = " and ".join(_ACTIVATIONS)
                return cls(not_served=f"{folder / place} is {name!r:.100}; allowed: torch.nn's {allowed}")
        return cls(raw=config.get("problem_type") == "regression")


def _module_kind(module: Any) -> str:
    return str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else ""


def _kind(path: Path, config: Mapping[str, Any]) -> PoolingKind:
    modes = config.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    names = [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    if len(names) != 1 or names[0] not in _KINDS:
        raise ConfigError(f"{path}: the pooling is {', '.join(names)}; allowed: one of {', '.join(_KINDS)}")
    return _KINDS[names[0]]
