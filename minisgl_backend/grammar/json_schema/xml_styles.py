"""Which schema keywords xgrammar's own converter enforces; it is used for arguments that are not JSON, as `qwen_xml`.

It silently ignores keywords that it does not know, and siblings of some keywords. Such schemas are refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minisgl_backend.grammar.json_schema.constraints import kind_of
from minisgl_backend.grammar.json_schema.document import SchemaError, escaped, preview
from minisgl_backend.grammar.json_schema.formats import FORMATS, UNSUPPORTED_FORMATS
from minisgl_backend.grammar.json_schema.keywords import CONSTRAINING

_OBJECT = ("properties", "required", "additionalProperties")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems")
_LENGTHS = ("minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALONE = ("$ref", "const", "enum", "anyOf")  # xgrammar reads the first that a schema has, and nothing else
_SUPPORTED = ("type", *_ALONE, *_OBJECT, *_ARRAY, *_LENGTHS, "pattern", "format", *_BOUNDS)
_FORMATS = (
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"),
    *("time", "uri", "uri-reference", "uri-template", "uuid"),
)


def check_supported(schema: Any, style: str, *, excludes: bool = False) -> None:
    """Raises SchemaError for the first keyword that xgrammar would ignore. Numbers of `schema` are int or Decimal.

    `excludes`: the structural tag has `excludes`, with which xgrammar ignores string lengths.
    """
    allowed = tuple(keyword for keyword in _SUPPORTED if not (excludes and keyword in _LENGTHS))
    todo = [(schema, "", True)]
    seen: set[tuple[int, bool]] = set()
    while todo:
        node, pointer, is_outer = todo.pop()
        if not isinstance(node, dict) or (id(node), is_outer) in seen:
            continue
        seen.add((id(node), is_outer))
        _check(node, pointer, style, allowed)
        if is_outer:
            _check_outer(node, pointer, style)
        todo += [(child, below, is_outer and keyword == "anyOf") for keyword, child, below in _below(node, pointer)]
        if "$ref" in node:
            todo.append((*_target(schema, node["$ref"], pointer, style), is_outer))


def _check_outer(node: dict[str, Any], pointer: str, style: str) -> None:
    """Checks the arguments' own object, where xgrammar would allow a named argument again as an additional one."""
    if node.get("properties") and node.get("additionalProperties", False) is not False:
        what = f"cannot be kept beside properties in arguments of the style {style}; allowed there: false"
        raise SchemaError("additionalProperties", pointer, what)


def _check(node: dict[str, Any], pointer: str, style: str, allowed: tuple[str, ...]) -> None:
    found = [keyword for keyword in node if keyword in CONSTRAINING]
    for keyword in found:
        if keyword not in allowed:
            what = f"cannot be kept in arguments of the style {style}; allowed there: {', '.join(allowed)}"
            raise SchemaError(keyword, pointer, what)
    if pointer and "$id" in node:
        raise SchemaError(
            "$id", pointer, f"cannot be kept in arguments of the style {style}; allowed there: at the root"
        )
    alone = next((keyword for keyword in _ALONE if keyword in node), None)
    if alone is None:
        _check_of_type(node, found, pointer, style)
        return
    for keyword in found:
        if keyword != alone and not (keyword == "type" and _all_have_type(node, alone)):
            what = f"cannot be kept beside {alone} in arguments of the style {style}; allowed there: one of them"
            raise SchemaError(keyword, pointer, what)


def _check_of_type(node: dict[str, Any], found: list[str], pointer: str, style: str) -> None:
    if "type" not in node:
        about = next((group for group in (_OBJECT, _ARRAY) if _names_type(node, group)), ())
        for keyword in found:
            if keyword not in about:
                raise SchemaError(
                    keyword,
                    pointer,
                    f"cannot be kept without a type in arguments of the style {style}; allowed: a type",
                )
    texts = ["pattern"] if "pattern" in node else []
    texts += ["format"] if _is_format(node.get("format")) else []
    texts += [name for name in _LENGTHS if name in node][:1]
    if len(texts) > 1:
        what = f"cannot be kept beside {texts[1]} in arguments of the style {style}; allowed there: one of them"
        raise SchemaError(texts[0], pointer, what)
    if "format" in texts and node["format"] not in _FORMATS:
        what = f"is {preview(node['format'])}, which cannot be kept in arguments of the style {style}"
        raise SchemaError("format", pointer, f"{what}; allowed there: {', '.join(_FORMATS)}")
    required, properties = node.get("required"), node.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        unknown = [name for name in required if isinstance(name, str) and name not in properties]
        if unknown:
            what = f"has {preview(unknown[0])}, which cannot be kept in arguments of the style {style}"
            raise SchemaError("required", pointer, f"{what}; allowed there: names that properties has")


def _names_type(node: dict[str, Any], group: tuple[str, ...]) -> bool:
    return any(keyword in node for keyword in group if keyword not in ("required", "minItems", "maxItems"))


def _is_format(name: Any) -> bool:
    """Whether JSON Schema defines the format; other names do not constrain values."""
    return isinstance(name, str) and (name in FORMATS or name in UNSUPPORTED_FORMATS)


def _all_have_type(node: dict[str, Any], keyword: str) -> bool:
    """Whether `type` is redundant, since all values of `const` or `enum` have one of its types."""
    if keyword not in ("const", "enum"):
        return False
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    values = node[keyword] if keyword == "enum" else [node[keyword]]
    return isinstance(values, list) and all(
        kind_of(value) in types or ("integer" in types and _is_integer(value)) for value in values
    )


def _is_integer(value: Any) -> bool:
    return kind_of(value) == "number" and (isinstance(value, int) or value == value.to_integral_value())


def _below(node: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any, str]]:
    """(keyword, subschema, its JSON pointer)"""
    for keyword in ("additionalProperties", "items"):
        yield keyword, node.get(keyword), f"{pointer}/{keyword}"
    for keyword in ("anyOf", "prefixItems"):
        parts = node.get(keyword)
        for number, one in enumerate(parts if isinstance(parts, list) else ()):
            yield keyword, one, f"{pointer}/{keyword}/{number}"
    properties = node.get("properties")
    for name, one in properties.items() if isinstance(properties, dict) else ():
        yield "properties", one, f"{pointer}/properties/{escaped(name)}"


def _target(root: Any, reference: Any, pointer: str, style: str) -> tuple[Any, str]:
    """The target of a reference as xgrammar resolves it: through objects only, without unescaping names."""
    what = f"is {preview(reference)}, which cannot be kept in arguments of the style {style}"
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError("$ref", pointer, f"{what}; allowed there: # or what begins with #/")
    found, where = root, ""
    for name in filter(None, reference[1:].split("/")):
        if not isinstance(found, dict) or name not in found:
            raise SchemaError("$ref", pointer, f"{what}: there is no {preview(name)}")
        found, where = found[name], f"{where}/{name}"
    return found, where
