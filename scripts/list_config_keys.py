"""Writes minisgl_backend/models/known_keys.json: the keys of the config classes of the native families' types, with
their defaults. Run it with the newest transformers; tests/unit/models/test_known_keys.py says when it is stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl_backend.models.families import FAMILIES

FILE = Path(__file__).resolve().parents[1] / "minisgl_backend" / "models" / "known_keys.json"
LONGEST_LIST = 8


def decoder_defaults(model_type: str) -> dict[str, Any] | None:
    """The keys of one type's text model, as config.json has them; None: it has no defaults of its own."""
    try:
        config = CONFIG_MAPPING[model_type]().get_text_config()
    except Exception:  # wrappers that are nothing without the configs of what they wrap; each raises something else
        return None
    values = json.loads(json.dumps(config.to_dict(), default=str))
    everywhere = PretrainedConfig().to_dict()
    return {key: _short(value) for key, value in values.items() if key not in everywhere}


def _short(value: Any) -> Any:
    """Lists of one value a layer hang on the number of layers: no default that a value could be compared with."""
    return "..." if isinstance(value, list) and len(value) > LONGEST_LIST else value


def content() -> dict[str, Any]:
    """By native type: the keys of its class with their defaults."""
    types = sorted({family.model_type for family in FAMILIES.values()})
    return {
        "transformers": transformers.__version__,
        "model_types": sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "defaults": {model_type: decoder_defaults(model_type) or {} for model_type in types},
    }


def text(known: dict[str, Any]) -> str:
    """JSON with a type a line, so that changes can be read."""
    defaults = known["defaults"].items()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(keys, sort_keys=True)}" for name, keys in defaults)
    head = {name: value for name, value in known.items() if name != "defaults"}
    return json.dumps(head)[:-1] + f', "defaults": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    FILE.write_text(text(content()), encoding="utf-8")
