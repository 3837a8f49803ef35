"""What a checkpoint says about the number formats of its weights. Needs no torch.

Who made the checkpoint (`quant_method`) decides how modules are named and left out; the formats themselves are known
to the readers of `number_formats.WEIGHT_FORMATS`, each in a file of `weights/schemes/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.number_formats import WEIGHT_FORMATS
from minisgl_backend.weights.formats import QuantizationConfig, SchemeRule, WeightScheme
from minisgl_backend.weights.module_patterns import is_expression
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.schemes.keys import CONFIG_JSON, PLAIN_INSTEAD, SchemeKeys, refusal

COMPRESSED_TENSORS, MODELOPT, GPTQ, AWQ, AUTO_ROUND = "compressed-tensors", "modelopt", "gptq", "awq", "auto-round"
_OTHER_NAMES = {
    "compressed_tensors": COMPRESSED_TENSORS,
    "intel/auto-round": AUTO_ROUND,
    "modelopt_fp8": MODELOPT,
}
# By which key a method that is not named is known: older ModelOpt's, bitsandbytes'.
_TOLD_BY = {"quant_algo": MODELOPT, "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
# By method: where it lists the modules that stay plain, and how that is meant. Others: _PLAIN_MODULES_OF_OTHERS.
_PLAIN_MODULES: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        COMPRESSED_TENSORS: (("ignore",), "whole names"),
        MODELOPT: (("ignore", "exclude_modules"), "wildcards"),
        AWQ: (("modules_to_not_convert",), "substrings"),
    }
)
_PLAIN_MODULES_OF_OTHERS = (("modules_to_not_convert", "ignored_layers", "ignore"), "path parts")
_LINEAR = "Linear"
_PLAIN_BITS = 16


class SchemeReader(Protocol):
    """Says in which variant of its format weights are: what `MethodFactory` gets as its parameters.

    keys: quantization_config, or one of the config_groups of compressed-tensors. None: it is another format. Raises
    ConfigError for a variant of its format that is not served.
    """

    def __call__(self, keys: SchemeKeys) -> Any: ...


def read_quantization_config(quantization: Any, names: TensorNames, path: str = CONFIG_JSON) -> QuantizationConfig:
    """quantization: what the checkpoint says; None: nothing. names: of the model's tensors. path: of `quantization`,
    its file first.

    Raises ConfigError naming the key, its value and what is served.
    """
    if quantization is None:
        return QuantizationConfig(names=names)
    if not isinstance(quantization, dict):
        raise refusal(path, quantization, "a JSON object, or absent")
    keys = SchemeKeys(_flat(quantization), path)
    method = _method(keys)
    rules = _RULES.get(method, _one_scheme)(keys, method)
    cache_refusal = _cache_refusal(keys)
    keys.check_unread()
    return QuantizationConfig(rules=rules, names=names, cache_refusal=cache_refusal)


def _flat(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the objects that ModelOpt (`quantization`) and transformers' class of compressed-tensors
    (`quantization_config`) put around the rest."""
    for key in ("quantization", "quantization_config"):
        if isinstance(said.get(key), dict):
            said = {**{name: value for name, value in said.items() if name != key}, **said[key]}
    return said


def _method(keys: SchemeKeys) -> str:
    """Of WEIGHT_FORMATS' readers. `method` is GPTQModel's name for the same."""
    guesses = [method for key, method in _TOLD_BY.items() if key in keys.values]
    said = str(keys.get("quant_method", next(iter(guesses), ""))).lower()
    method = _OTHER_NAMES.get(said, said)
    readers = _readers(method)
    if not readers:
        keys.refuse("quant_method", f"{', '.join(_methods())}; {PLAIN_INSTEAD}")
    if str(keys.get("method", said)).lower() != said:
        keys.refuse("method", f"what quant_method is, {said}")
    return method


def _methods() -> list[str]:
    return sorted({method for row in WEIGHT_FORMATS.values() for method in row.readers})


def _readers(method: str) -> dict[str, str]:
    """By the name of the format."""
    return {name: row.readers[method] for name, row in WEIGHT_FORMATS.items() if method in row.readers}


def _read(keys: SchemeKeys, method: str) -> WeightScheme:
    readers = _readers(method)
    for name, reader in readers.items():
        found = load_attribute(reader)(keys)
        if found is not None:
            return WeightScheme(name, found)
    titles = "; ".join(WEIGHT_FORMATS[name].title for name in readers)
    raise refusal(keys.path, dict(keys.values), f"{titles}; {PLAIN_INSTEAD}")


def _left_plain(keys: SchemeKeys, method: str) -> SchemeRule:
    names, matches = _PLAIN_MODULES.get(method, _PLAIN_MODULES_OF_OTHERS)
    return SchemeRule(None, tuple(one for name in names for one in keys.strings(name)), matches)


def _one_scheme(keys: SchemeKeys, method: str) -> tuple[SchemeRule, ...]:
    """All linear layers alike, except those that are listed."""
    left_plain = _left_plain(keys, method)
    only = keys.strings("modules_to_convert")  # of transformers
    return left_plain, SchemeRule(_read(keys, method), only or None)


def _of_modelopt(keys: SchemeKeys, method: str) -> tuple[SchemeRule, ...]:
    left_plain = _left_plain(keys, method)
    if keys.get("quant_algo") is None and keys.child("config_groups") is None:  # the cache alone was calibrated
        return ()
    return left_plain, SchemeRule(_read(keys, method))


def _of_gptq(keys: SchemeKeys, method: str) -> tuple[SchemeRule, ...]:
    """And of AWQ, since GPTQModel writes both: with its `dynamic`, regular expressions of module paths and what is
    different there."""
    left_plain, scheme = _left_plain(keys, method), _read(keys, method)
    dynamic = keys.child("dynamic")
    exceptions = []
    for pattern in dynamic.values if dynamic is not None else ():
        changes = dynamic.get(pattern, {}) if dynamic is not None else {}
        if dynamic is not None and not isinstance(changes, dict):
            dynamic.refuse(pattern, "a JSON object")
        other = None if pattern.startswith("-:") else _changed(keys, changes, method)
        exceptions.append(SchemeRule(other, (pattern.removeprefix("-:").removeprefix("+:"),), "expressions"))
    named = _names(keys, "modules_in_block_to_quantize")
    return left_plain, *_joined(exceptions), SchemeRule(scheme, named or None, "substrings of any")


def _of_auto_round(keys: SchemeKeys, method: str) -> tuple[SchemeRule, ...]:
    """`extra_config` has the differences of modules, `block_name_to_quantize` the blocks that are quantized at all."""
    scheme = _read(keys, method)
    extra = keys.child("extra_config")
    exceptions = []
    for name in sorted(extra.values, key=is_expression) if extra is not None else ():  # names count first
        changes = extra.get(name, {}) if extra is not None else {}
        if extra is not None and not isinstance(changes, dict):
            extra.refuse(name, "a JSON object")
        other = None if changes.get("bits") == _PLAIN_BITS else _changed(keys, changes, method)
        exceptions.append(SchemeRule(other, (name,), "names or expressions"))
    blocks = _names(keys, "block_name_to_quantize") or _names(keys, "to_quant_block_names")
    return *_joined(exceptions), _left_plain(keys, method), SchemeRule(scheme, blocks or None, "beginnings")


def _joined(rules: Iterable[SchemeRule]) -> Iterator[SchemeRule]:
    """Rules that say the same one after the other, which config files have by the thousand, as one."""
    for (scheme, matches), same in groupby(rules, key=lambda rule: (rule.scheme, rule.matches)):
        yield SchemeRule(scheme, tuple(pattern for rule in same for pattern in rule.patterns or ()), matches)


def _changed(keys: SchemeKeys, changes: Mapping[str, Any], method: str) -> WeightScheme:
    """The scheme where some keys have other values."""
    changed = SchemeKeys({**keys.values, **changes}, keys.path)
    scheme = _read(changed, method)
    changed.without_effect(*(key for key in keys.values if key not in changes))
    changed.check_unread()
    return scheme


def _names(keys: SchemeKeys, key: str) -> tuple[str, ...]:
    """A list of names, one of such lists, or text with commas between them."""
    value = keys.get(key, [])
    lists = [one.strip() for one in value.split(",")] if isinstance(value, str) else value
    flat = (
        [name for one in lists for name in (one if isinstance(one, list) else [one])]
        if isinstance(lists, list)
        else lists
    )
    if not isinstance(flat, list) or not all(isinstance(one, str) for one in flat):
        keys.refuse(key, "names of modules, or lists of them")
    return tuple(name for name in flat if name)


def _of_compressed_tensors(keys: SchemeKeys, method: str) -> tuple[SchemeRule, ...]:
    """Modules are named for each of several schemes.

    Source: https://github.com/neuralmagic/compressed-tensors (QuantizationConfig)
    """
    keys.without_effect("version")
    sparsity = keys.child("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        sparsity.refuse("format", f"dense: sparse weights are not served; {PLAIN_INSTEAD}")
    left_plain = _left_plain(keys, method)
    if _LINEAR in (left_plain.patterns or ()):
        left_plain = SchemeRule(None)
    ranked: tuple[list[SchemeRule], ...] = ([], [], [])  # a name counts before an expression, and that before a class
    groups, whole = keys.child("config_groups"), keys.get("format")
    for name in groups.values if groups is not None else ():
        group = groups.child(name) if groups is not None else None
        if group is None:
            raise refusal(f"{keys.path}.config_groups.{name}", {}, "weights and targets")
        scheme = _of_group(group, whole, method)
        for target in group.strings("targets"):
            if target == _LINEAR:
                ranked[2].append(SchemeRule(scheme))
            elif "." in target or not target[:1].isupper():
                ranked[target.startswith("re:")].append(SchemeRule(scheme, (target,), "whole names"))
            elif scheme is not None:
                group.refuse(
                    "targets", f"{_LINEAR}, paths of modules, and regular expressions after re:; {PLAIN_INSTEAD}"
                )
    # Files where the cache alone was calibrated have no groups, and say so.
    said = "config_groups" in keys.values or _cache_refusal(keys) is None
    if not any(ranked) and not (said and keys.get("kv_cache_scheme")):
        keys.refuse("config_groups", "one group or more, or a kv_cache_scheme")
    return left_plain, *(rule for rules in ranked for rule in rules)


def _of_group(group: SchemeKeys, whole: Any, method: str) -> WeightScheme | None:
    """Of one of config_groups, where nothing may be quantized. whole: the format of all groups that say none."""
    group.choice("output_activations", (None,))
    if "weights" in group.values and not any(map(group.child, ("weights", "input_activations"))):
        return None
    said = SchemeKeys({"format": whole, **{k: v for k, v in group.values.items() if v is not None}}, group.path)
    said.without_effect("targets", "output_activations")
    scheme = _read(said, method)
    said.check_unread()
    return scheme


_RULES: Mapping[str, Callable[[SchemeKeys, str], tuple[SchemeRule, ...]]] = MappingProxyType(
    {
        COMPRESSED_TENSORS: _of_compressed_tensors,
        MODELOPT: _of_modelopt,
        GPTQ: _of_gptq,
        AWQ: _of_gptq,
        AUTO_ROUND: _of_auto_round,
    }
)


def _cache_refusal(keys: SchemeKeys) -> str | None:
    """Why an FP8 cache cannot have the checkpoint's scales: here it has one of the keys of a layer, and one of the
    values. None: they are such, or there are none."""
    served = {
        "kv_cache_quant_algo": _is_fp8,  # of ModelOpt
        "kv_cache_scheme": _is_static_fp8,
        "static_kv_dtype": _is_fp8,  # of AutoRound
        "static_kv_granularity": lambda value: keys.get("static_kv_dtype") is None or value == "tensor",
    }
    for key, is_served in served.items():
        value = keys.get(key)
        if value is not None and not is_served(value):
            allowed = "8 bits, float, static, one scale a tensor; or absent"
            return str(refusal(f"{keys.path}.{key}", value, f"with an FP8 cache: {allowed}"))
    return None


def _is_fp8(value: object) -> bool:
    return str(value).lower().removeprefix("torch.") in ("fp8", "fp8_e4m3", "float8_e4m3fn")


def _is_static_fp8(scheme: object) -> bool:
    if not isinstance(scheme, dict):
        return scheme == "static" or _is_fp8(scheme)  # a word in AutoFP8's checkpoints, and in some of ModelOpt's
    bits, kind = str(scheme.get("num_bits")), str(scheme.get("type")).lower()
    strategy = str(scheme.get("strategy") or "tensor").lower()
    is_plain = not scheme.get("dynamic") and scheme.get("symmetric") in (None, True)
    return (bits, kind, strategy, is_plain) == ("8", "float", "tensor", True)
