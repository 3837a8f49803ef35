"""A JSON schema as a document: its subschemas by JSON pointer, and the resolution of references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from minisgl_backend.errors import InvalidRequestError

MAX_NODES = 50_000  # schemas in a document
SCHEMA_KEYWORDS = (
    *("additionalProperties", "additionalItems", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_MAP_KEYWORDS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


class SchemaError(InvalidRequestError):
    """A keyword with an invalid value, or one that cannot be enforced."""

    def __init__(self, keyword: str, pointer: str, what: str) -> None:
        """`pointer`: JSON pointer to the schema that has the keyword."""
        super().__init__(f"guided_decoding_guide: the schema's {keyword} at {pointer or '/'} {what}")


class Node:
    """A schema and its location: an object, true or false. Compared by identity."""

    __slots__ = ("base", "pointer", "schema")

    def __init__(self, schema: Any, base: str, pointer: str) -> None:
        """`base`: the URI that its references are relative to; `pointer`: its JSON pointer."""
        self.schema, self.base, self.pointer = schema, base, pointer

    def error(self, keyword: str, what: str) -> SchemaError:
        return SchemaError(keyword, self.pointer, what)

    def __getitem__(self, keyword: str) -> Any:
        return self.schema.get(keyword) if isinstance(self.schema, dict) else None


class Document:
    """All schemas of a document, whose numbers are int or Decimal."""

    def __init__(self, schema: Any) -> None:
        """Raises SchemaError."""
        self._nodes: dict[int, Node] = {}  # by id of the schema, which the document keeps alive
        self._resources: dict[str, Node] = {}  # by URI
        self._anchors: dict[tuple[str, str], Node] = {}  # by URI of the resource, and name
        self._synthetic: dict[Any, Node] = {}
        self.dynamic: dict[str, int] = {}  # $dynamicAnchor -> number of schemas that have it
        self.root = self._add(schema, "", "")
        self._resources.setdefault("", self.root)

    def child(self, parent: Node, *path: str | int) -> Node:
        """The schema at a path within another one. Raises SchemaError if there is none."""
        schema = parent.schema
        for key in path:
            schema = schema[key]
        pointer = parent.pointer + "".join(f"/{escaped(str(key))}" for key in path)
        if isinstance(schema, bool):
            return self.synthetic(schema, pointer)
        if not isinstance(schema, dict):
            raise SchemaError(str(path[0]), parent.pointer, f"is {preview(schema)}; allowed: a schema")
        return self._nodes.get(id(schema)) or self._add(schema, parent.base, pointer)

    def synthetic(self, schema: Any, pointer: str, *, key: Any = None) -> Node:
        """A schema that is not part of the document; the same node for the same key."""
        key = (schema, pointer) if key is None else key
        if key not in self._synthetic:
            self._synthetic[key] = Node(schema, "", pointer)
        return self._synthetic[key]

    def target(self, node: Node, keyword: str = "$ref") -> Node:
        """The target of a schema's reference. Raises SchemaError."""
        reference = node[keyword]
        if not isinstance(reference, str):
            raise node.error(keyword, f"is {preview(reference)}; allowed: a text")
        address, fragment = urldefrag(_joined(node.base, reference))
        resource = self._resources.get(address)
        if resource is None:
            raise node.error(
                keyword, f"is {preview(reference)}, which this schema does not hold; allowed: its own parts"
            )
        if not fragment or fragment.startswith("/"):
            return self._at(resource, unquote(fragment), node, keyword)
        anchor = self._anchors.get((address, unquote(fragment)))
        if anchor is None:
            raise node.error(keyword, f"is {preview(reference)}: there is no such anchor")
        return anchor

    def _at(self, node: Node, fragment: str, source: Node, keyword: str) -> Node:
        schema, base, pointer = node.schema, node.base, node.pointer
        for key in map(_unescaped, fragment.split("/")[1:]):
            if isinstance(schema, dict) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                raise source.error(keyword, f"is {preview(source[keyword])}: there is no {preview(key)}")
            pointer += f"/{escaped(key)}"
            base = self._nodes[id(schema)].base if id(schema) in self._nodes else base
        if isinstance(schema, bool):
            return self.synthetic(schema, pointer)
        if not isinstance(schema, dict):
            raise source.error(keyword, f"is {preview(source[keyword])}, where no schema is but {preview(schema)}")
        return self._nodes.get(id(schema)) or self._add(schema, base, pointer)

    def _add(self, schema: Any, base: str, pointer: str) -> Node:
        """Adds a schema and all its subschemas."""
        first = Node(schema, base, pointer)
        todo = [first]
        while todo:
            node = todo.pop()
            if not isinstance(node.schema, dict) or id(node.schema) in self._nodes:
                continue
            if len(self._nodes) >= MAX_NODES:
                raise node.error("size", f"is too large; allowed: at most {MAX_NODES} schemas")
            self._nodes[id(node.schema)] = node
            self._name(node)
            for path, child in _children(node.schema):
                below = "".join(f"/{escaped(key)}" for key in path)
                todo.append(Node(child, node.base, node.pointer + below))
        return first

    def _name(self, node: Node) -> None:
        """Registers the schema's URI and anchors."""
        own = node["$id"]
        if isinstance(own, str) and not own.startswith("#"):
            node.base = urldefrag(_joined(node.base, own)).url
            known = self._resources.setdefault(node.base, node)
            if known.schema != node.schema:
                raise node.error("$id", f"is {preview(own)}, as is that of {known.pointer or '/'}")
        elif isinstance(own, str):  # an anchor in draft 7
            self._anchors.setdefault((node.base, own[1:]), node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node[keyword]
            if isinstance(name, str):
                self._anchors.setdefault((node.base, name), node)
        if isinstance(node["$dynamicAnchor"], str):
            self.dynamic[node["$dynamicAnchor"]] = self.dynamic.get(node["$dynamicAnchor"], 0) + 1


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for keyword in SCHEMA_KEYWORDS:
        if isinstance(schema.get(keyword), dict):
            yield (keyword,), schema[keyword]
    for keyword in SCHEMA_LIST_KEYWORDS:
        if isinstance(schema.get(keyword), list):
            for number, one in enumerate(schema[keyword]):
                yield (keyword, str(number)), one
    for keyword in SCHEMA_MAP_KEYWORDS:
        if isinstance(schema.get(keyword), dict):
            for name, one in schema[keyword].items():
                yield (keyword, name), one


def _joined(base: str, reference: str) -> str:
    """`urljoin` does not handle URNs, within which references are fragments or absolute."""
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescaped(key: str) -> str:
    return key.replace("~1", "/").replace("~0", "~")


def preview(value: Any) -> str:
    """The value as JSON, shortened."""
    text = json_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return float(o) if isinstance(o, Decimal) else super().default(o)


def json_text(value: Any) -> str:
    """Like json.dumps, but without escaping non-ASCII characters, and with Decimals."""
    return json.dumps(value, ensure_ascii=False, cls=_Encoder)
