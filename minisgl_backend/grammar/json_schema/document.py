"""A JSON schema as a document: its schemas by place, and what references lead to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from minisgl_backend.errors import InvalidRequestError

MAX_NODES = 50_000  # schemas of a document
IN_ONE = (
    *("additionalProperties", "additionalItems", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
IN_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


class SchemaError(InvalidRequestError):
    """A keyword that is wrong or cannot be kept."""

    def __init__(self, keyword: str, place: str, what: str) -> None:
        """`place`: a JSON pointer of the schema that has the keyword."""
        super().__init__(f"guided_decoding_guide: the schema's {keyword} at {place or '/'} {what}")


class Node:
    """A schema at a place: an object, true or false. Compared by identity."""

    __slots__ = ("base", "place", "schema")

    def __init__(self, schema: Any, base: str, place: str) -> None:
        """`base`: the address that its references start from; `place`: a JSON pointer."""
        self.schema, self.base, self.place = schema, base, place

    def error(self, keyword: str, what: str) -> SchemaError:
        return SchemaError(keyword, self.place, what)

    def __getitem__(self, keyword: str) -> Any:
        return self.schema.get(keyword) if isinstance(self.schema, dict) else None


class Document:
    """All schemas of one text. Numbers are int or Decimal."""

    def __init__(self, schema: Any) -> None:
        """Raises SchemaError."""
        self._nodes: dict[int, Node] = {}  # by id of the schema, which the document keeps alive
        self._resources: dict[str, Node] = {}  # by address
        self._anchors: dict[tuple[str, str], Node] = {}  # by the address that has them, and their name
        self._made: dict[Any, Node] = {}
        self.dynamic: dict[str, int] = {}  # $dynamicAnchor -> how many there are
        self.root = self._add(schema, "", "")
        self._resources.setdefault("", self.root)

    def child(self, parent: Node, *path: str | int) -> Node:
        """The schema at a path below another one. Raises SchemaError where there is none."""
        schema = parent.schema
        for key in path:
            schema = schema[key]
        place = parent.place + "".join(f"/{escaped(str(key))}" for key in path)
        if isinstance(schema, bool):
            return self.made(schema, place)
        if not isinstance(schema, dict):
            raise SchemaError(str(path[0]), parent.place, f"is {shown(schema)}; allowed: a schema")
        return self._nodes.get(id(schema)) or self._add(schema, parent.base, place)

    def made(self, schema: Any, place: str, *, key: Any = None) -> Node:
        """One that no text has; the same for the same key."""
        key = (schema, place) if key is None else key
        if key not in self._made:
            self._made[key] = Node(schema, "", place)
        return self._made[key]

    def target(self, node: Node, keyword: str = "$ref") -> Node:
        """What the reference of a schema leads to. Raises SchemaError."""
        reference = node[keyword]
        if not isinstance(reference, str):
            raise node.error(keyword, f"is {shown(reference)}; allowed: a text")
        address, fragment = urldefrag(_joined(node.base, reference))
        resource = self._resources.get(address)
        if resource is None:
            raise node.error(keyword, f"is {shown(reference)}, which this schema does not hold; allowed: its own parts")
        if not fragment or fragment.startswith("/"):
            return self._at(resource, unquote(fragment), node, keyword)
        anchor = self._anchors.get((address, unquote(fragment)))
        if anchor is None:
            raise node.error(keyword, f"is {shown(reference)}: there is no such anchor")
        return anchor

    def _at(self, node: Node, pointer: str, source: Node, keyword: str) -> Node:
        schema, base, place = node.schema, node.base, node.place
        for key in map(_unescaped, pointer.split("/")[1:]):
            if isinstance(schema, dict) and key in schema:
                schema = schema[key]
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                schema = schema[int(key)]
            else:
                raise source.error(keyword, f"is {shown(source[keyword])}: there is no {shown(key)}")
            place += f"/{escaped(key)}"
            base = self._nodes[id(schema)].base if id(schema) in self._nodes else base
        if isinstance(schema, bool):
            return self.made(schema, place)
        if not isinstance(schema, dict):
            raise source.error(keyword, f"is {shown(source[keyword])}, where no schema is but {shown(schema)}")
        return self._nodes.get(id(schema)) or self._add(schema, base, place)

    def _add(self, schema: Any, base: str, place: str) -> Node:
        """It and all below it."""
        first = Node(schema, base, place)
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
                todo.append(Node(child, node.base, node.place + below))
        return first

    def _name(self, node: Node) -> None:
        """Notes by which names the schema is known."""
        own = node["$id"]
        if isinstance(own, str) and not own.startswith("#"):
            node.base = urldefrag(_joined(node.base, own)).url
            known = self._resources.setdefault(node.base, node)
            if known.schema != node.schema:
                raise node.error("$id", f"is {shown(own)}, as is that of {known.place or '/'}")
        elif isinstance(own, str):  # draft 7 writes anchors so
            self._anchors.setdefault((node.base, own[1:]), node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node[keyword]
            if isinstance(name, str):
                self._anchors.setdefault((node.base, name), node)
        if isinstance(node["$dynamicAnchor"], str):
            self.dynamic[node["$dynamicAnchor"]] = self.dynamic.get(node["$dynamicAnchor"], 0) + 1


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for keyword in IN_ONE:
        if isinstance(schema.get(keyword), dict):
            yield (keyword,), schema[keyword]
    for keyword in IN_LISTS:
        if isinstance(schema.get(keyword), list):
            for number, one in enumerate(schema[keyword]):
                yield (keyword, str(number)), one
    for keyword in IN_MAPS:
        if isinstance(schema.get(keyword), dict):
            for name, one in schema[keyword].items():
                yield (keyword, name), one


def _joined(base: str, reference: str) -> str:
    """`urljoin` knows no urn: references within one are fragments, or whole addresses."""
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


def shown(value: Any) -> str:
    """The value as JSON, shortened."""
    text = json_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return float(o) if isinstance(o, Decimal) else super().default(o)


def json_text(value: Any) -> str:
    """As json.dumps writes it, but characters as they are, and Decimals, too."""
    return json.dumps(value, ensure_ascii=False, cls=_Encoder)
