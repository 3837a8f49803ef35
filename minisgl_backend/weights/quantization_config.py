"""What a checkpoint says about the number formats of its weights: config.json's quantization_config. Needs no torch.

Who made the checkpoint (`quant_method`) decides how modules are named and left out; the formats themselves are known
to the readers of `number_formats.WEIGHT_FORMATS`, each in a file of `weights/schemes/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.number_formats import WEIGHT_FORMATS
from minisgl_backend.weights.formats import QuantizationConfig, SchemeRule, WeightScheme
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.schemes.int4 import gptq_exceptions
from minisgl_backend.weights.schemes.keys import PLAIN_INSTEAD, SchemeKeys, refusal

COMPRESSED_TENSORS = "compressed-tensors"
GPTQ = "gptq"
# Where the other methods list the modules that stay plain.
_PLAIN_MODULES: Mapping[str, tuple[str, ...]] = {"modelopt": ("ignore", "exclude_modules")}
_PLAIN_MODULES_OF_OTHERS = ("modules_to_not_convert", "ignored_layers", "ignore")
_LINEAR = "Linear"


class SchemeReader(Protocol):
    """Says in which variant of its format weights are: what `MethodFactory` gets as its parameters.

    keys: quantization_config, or one of the config_groups of compressed-tensors. None: it is another format. Raises
    ConfigError for a variant of its format that is not served.
    """

    def __call__(self, keys: SchemeKeys) -> Any: ...


def read_quantization_config(quantization: Any, names: TensorNames) -> QuantizationConfig:
    """quantization: config.json's quantization_config, None where there is none. names: of the model's tensors.

    Raises ConfigError naming the key, its value and what is served.
    """
    plain = QuantizationConfig(names=names)
    if quantization is None:
        return plain
    if not isinstance(quantization, dict):
        raise refusal("quantization_config", quantization, "a JSON object, or absent")
    keys = SchemeKeys(quantization)
    method = str(keys.get("quant_method", "")).lower()
    readers = _readers(method)
    if not readers:
        keys.refuse("quant_method", f"{', '.join(_methods())}; {PLAIN_INSTEAD}")
    rules = _groups(keys) if method == COMPRESSED_TENSORS else _one_scheme(keys, method, readers)
    _check_cache_scheme(keys)
    keys.check_unread()
    return QuantizationConfig(rules=rules, names=names)


def _methods() -> list[str]:
    return sorted({method for row in WEIGHT_FORMATS.values() for method in row.readers})


def _readers(method: str) -> dict[str, str]:
    """By the name of the format."""
    return {name: row.readers[method] for name, row in WEIGHT_FORMATS.items() if method in row.readers}


def _read(keys: SchemeKeys, readers: Mapping[str, str]) -> WeightScheme | None:
    for name, reader in readers.items():
        found = load_attribute(reader)(keys)
        if found is not None:
            return WeightScheme(name, found)
    return None


def _one_scheme(keys: SchemeKeys, method: str, readers: Mapping[str, str]) -> tuple[SchemeRule, ...]:
    """All linear layers alike, except those that are listed."""
    left_plain: tuple[str, ...] = ()
    for key in _PLAIN_MODULES.get(method, _PLAIN_MODULES_OF_OTHERS):
        left_plain += keys.strings(key)
    scheme = _read(keys, readers)
    if scheme is None:
        titles = "; ".join(WEIGHT_FORMATS[name].title for name in readers)
        raise refusal(keys.path, dict(keys.values), f"for quant_method {method}: {titles}; {PLAIN_INSTEAD}")
    if method != GPTQ:
        return (SchemeRule(None, left_plain), SchemeRule(scheme))
    blocks = keys.get("modules_in_block_to_quantize", [])
    if not isinstance(blocks, list) or not all(isinstance(one, list) for one in blocks):
        keys.refuse("modules_in_block_to_quantize", "lists of the names of modules, or absent")
    named = tuple(str(name) for one in blocks for name in one)
    return (SchemeRule(None, left_plain), *_exceptions(keys, readers), SchemeRule(scheme, named or ("*",)))


def _exceptions(keys: SchemeKeys, readers: Mapping[str, str]) -> list[SchemeRule]:
    """Of GPTQModel's `dynamic`."""
    found = []
    for pattern, changes in gptq_exceptions(keys):
        scheme = None
        if changes is not None:
            changed = SchemeKeys({**keys.values, **changes}, keys.path)
            scheme = _read(changed, readers)
            changed.without_effect(*(key for key in keys.values if key not in changes))
            changed.check_unread()
        found.append(SchemeRule(scheme, (f"re:{pattern}",)))
    return found


def _groups(keys: SchemeKeys) -> tuple[SchemeRule, ...]:
    """Of compressed-tensors, which names modules for each of several schemes.

    Source: https://github.com/neuralmagic/compressed-tensors (QuantizationConfig)
    """
    keys.without_effect("version", "global_compression_ratio", "quantization_status", "quantization_config")
    sparsity = keys.child("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        sparsity.refuse("format", f"dense: sparse weights are not served; {PLAIN_INSTEAD}")
    rules = [SchemeRule(None, keys.strings("ignore"))]
    ranked: tuple[list[SchemeRule], ...] = ([], [], [])  # a path counts before an expression, and that before a class
    whole = keys.get("format")
    groups = keys.child("config_groups")
    for name in groups.values if groups is not None else ():
        group = groups.child(name) if groups is not None else None
        if group is None:
            raise refusal(f"{keys.path}.config_groups.{name}", {}, "weights and targets")
        targets = [_target(group, one) for one in group.strings("targets")]
        group.choice("output_activations", (None,))
        group = SchemeKeys({"format": whole, **{k: v for k, v in group.values.items() if v is not None}}, group.path)
        group.without_effect("targets", "output_activations")
        scheme = _read(group, _readers(COMPRESSED_TENSORS))
        if scheme is None:
            titles = "; ".join(row.title for row in WEIGHT_FORMATS.values() if COMPRESSED_TENSORS in row.readers)
            raise refusal(group.path, dict(group.values), f"{titles}; {PLAIN_INSTEAD}")
        group.check_unread()
        for rank, same in enumerate(ranked):
            if patterns := tuple(one for one in targets if _rank(one) == rank):
                same.append(SchemeRule(scheme, patterns))
    for same in ranked:
        rules += same
    if len(rules) == 1 and keys.get("kv_cache_scheme") is None:
        keys.refuse("config_groups", "one group or more, or a kv_cache_scheme")
    return tuple(rules)


def _target(group: SchemeKeys, target: str) -> str:
    """A pattern of `SchemeRule`."""
    if target == _LINEAR:
        return "*"
    if target[:1].isupper() and "." not in target:
        group.refuse("targets", f"{_LINEAR}, paths of modules, and regular expressions after re:; {PLAIN_INSTEAD}")
    return target


def _rank(pattern: str) -> int:
    """Before which others a target of compressed-tensors counts, whatever the order of the groups."""
    return 2 if pattern == "*" else 1 if pattern.startswith("re:") else 0


def _check_cache_scheme(keys: SchemeKeys) -> None:
    """Scales of an FP8 cache, which `kv_scales` reads where the option kv_cache_dtype asks for one."""
    if keys.get("kv_cache_quant_algo", "FP8") not in ("FP8", "fp8"):
        keys.refuse("kv_cache_quant_algo", '"FP8", or absent')
    scheme = keys.get("kv_cache_scheme")
    if scheme in (None, "static"):  # a word in AutoFP8's checkpoints
        return
    if not (
        isinstance(scheme, dict)
        and (scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy") or "tensor") == (8, "float", "tensor")
        and not scheme.get("dynamic")
    ):
        keys.refuse("kv_cache_scheme", "8 bits, float, static, one scale a tensor; or absent")
