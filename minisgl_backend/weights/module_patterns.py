"""Which modules a list in a checkpoint's config means, by the rule of the library that wrote it. Needs no torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from minisgl_backend.errors import ConfigError

REGEX = "re:"
_EXPERTS = "experts"
_SPECIAL = frozenset("*+?^$()[]{}|\\")
_RULES = 4096  # of a config, whose patterns are kept compiled
_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class ModuleNames:
    """What one module may be called: in this project, in the checkpoint, and with the prefixes of both."""

    own: tuple[str, ...]
    experts: tuple[str, ...] = ()  # of an expert's weight: the module of all experts around it
    merged: tuple[str, ...] = ()  # of the layer that others multiply it in: qkv_proj, gate_up_proj
    holds_experts: bool = True  # whether the checkpoint has the weights of all experts in one tensor, of `experts`


def _whole_names(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A literal is a module's whole name, so that a parent's says nothing of its children; an expression after `re:`
    begins where the name begins.

    Source: compressed_tensors.utils.match.match_name; of merged layers should_ignore_layer in vLLM.
    """
    literals, expressions = _literals_and_expressions(patterns)
    own = names.own + (names.experts if names.holds_experts else ())
    return any(one in literals for one in (*own, *names.merged)) or any(
        one.match(name) for one in expressions for name in own
    )


def _path_parts(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A literal is a module's name, a parent's, or any run of parts of it: `model.layers.0`, `self_attn`, `gate`; * is
    any text. An expression after `re:` begins where the name begins.

    Sources: should_convert_module in transformers (from the start up to a dot, or at the end); _module_path_match in
    SGLang.
    """
    literals, expressions = _parts(patterns)
    for name in (*names.own, *names.experts):
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        if any(run in literals for run in runs) or any(one.match(name) for one in expressions):
            return True
    return False


def _substrings(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A literal is anywhere in the name: `self_attn`, `layers.0.`, `mlp.gate`. Experts are one module, so that `gate`
    is not their gate_proj, unless the literal names experts. Expressions as in `_path_parts`.

    Sources: exclude_layers_to_not_quantize in AutoAWQ; is_layer_skipped (skip_with_substr) in vLLM.
    """
    literals, expressions = _with_stars(patterns)
    inside = [one for one in literals if _EXPERTS in one] if names.experts else []
    return (
        any(one in name for one in literals for name in names.experts or names.own)
        or any(one in name for one in inside for name in names.own)
        or any(one.match(name) for one in expressions for name in (*names.own, *names.experts))
    )


def _substrings_of_any(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A literal is anywhere in the name, of each expert's weights as well.

    Sources: GPTQ's modules_in_block_to_quantize; is_layer_gptq_quantized in vLLM.
    """
    return any(one in name for one in patterns for name in names.own)


def _wildcards(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A literal as in `_path_parts`; with *, ? or [...] it is a whole name, dots included.

    Sources: ModelOpt's exclude_modules; is_layer_excluded in vLLM.
    """
    literals, beginnings, globs = _literals_and_globs(patterns)
    everything = (*names.own, *names.experts, *names.merged)
    return _path_parts(names, literals) or any(
        name.startswith(beginnings) or any(one.match(name) for one in globs) for name in everything
    )


def _expressions(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """Regular expressions that begin where the name begins.

    Sources: GPTQModel's dynamic; get_dynamic_override in vLLM.
    """
    return any(one.match(name) for one in _compiled(patterns) for name in (*names.own, *names.experts))


def _names_or_expressions(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """A module's whole name, or an expression for it.

    Source: AutoRound's extra_config, in its own reader and in SGLang.
    """
    literals, expressions = _names_and_compiled(patterns)
    everything = (*names.own, *names.experts)
    return any(one in literals for one in everything) or any(
        one.fullmatch(name) for one in expressions for name in everything
    )


def _beginnings(names: ModuleNames, patterns: tuple[str, ...]) -> bool:
    """What names begin with.

    Source: AutoRound's block_name_to_quantize.
    """
    return any(name.startswith(patterns) for name in names.own)


# How lists of modules are to be read, by whose they are.
MATCHERS: Mapping[str, Callable[[ModuleNames, tuple[str, ...]], bool]] = MappingProxyType(
    {
        "whole names": _whole_names,
        "path parts": _path_parts,
        "substrings": _substrings,
        "substrings of any": _substrings_of_any,
        "wildcards": _wildcards,
        "expressions": _expressions,
        "names or expressions": _names_or_expressions,
        "beginnings": _beginnings,
    }
)


def is_expression(name: str) -> bool:
    """Of AutoRound's names of modules."""
    return not _SPECIAL.isdisjoint(name)


# Of a config: as many as it has rules, each with patterns by the thousand.
@lru_cache(maxsize=_RULES)
def _literals_and_expressions(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Literals are listed by the hundred."""
    return (
        frozenset(one for one in patterns if one and not one.startswith(REGEX)),
        tuple(_compile(one.removeprefix(REGEX), one) for one in patterns if one.startswith(REGEX)),
    )


@lru_cache(maxsize=_RULES)
def _with_stars(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Literals without a star; those with one are expressions."""
    literals, expressions = _literals_and_expressions(patterns)
    starred = frozenset(one for one in literals if "*" in one)
    return literals - starred, (*expressions, *map(_starred, sorted(starred)))


@lru_cache(maxsize=_RULES)
def _parts(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    literals, expressions = _with_stars(patterns)
    return frozenset(one.strip(".") for one in literals), expressions


@lru_cache(maxsize=_RULES)
def _literals_and_globs(
    patterns: tuple[str, ...],
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[re.Pattern[str], ...]]:
    """Literals, what stands before a star at the end, as ModelOpt writes it by the thousand, and other wildcards."""
    wild = {one for one in patterns if _WILDCARDS.search(one) and not one.startswith(REGEX)}
    beginnings = {one for one in wild if not _WILDCARDS.search(one[:-1]) and one.endswith("*")}
    globs = tuple(re.compile(fnmatch.translate(one)) for one in sorted(wild - beginnings))
    return tuple(one for one in patterns if one not in wild), tuple(one[:-1] for one in beginnings), globs


def _starred(pattern: str) -> re.Pattern[str]:
    text = ".*".join(re.escape(part) for part in pattern.strip(".").split("*"))
    return re.compile(rf"(?:.*\.)?{text}(?:\..*)?\Z")


@lru_cache(maxsize=_RULES)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(_compile(one, one) for one in patterns)


@lru_cache(maxsize=_RULES)
def _names_and_compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    expressions = tuple(filter(is_expression, patterns))
    return frozenset(patterns).difference(expressions), _compiled(expressions)


def _compile(text: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"config.json: quantization_config has the pattern {pattern!r}, which is none: {error}"
        ) from None
