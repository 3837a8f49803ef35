"""State has one writer: who may assign what, read from the syntax trees of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "minisgl_backend"
# All rooms but those that configure libraries by their attributes.
ROOMS = (
    *("cache", "delivery", "engine", "grammar", "ipc", "kv", "layers", "models", "parsers", "runner", "sampling"),
    *("scheduler", "serving", "text", "weights"),
)
FOREIGN = {"_replace", "compile", "listener", "meta_path", "modules", "run", "writeable"}  # of Triton, Python and NumPy
MUTATORS = {"append", "appendleft", "clear", "discard", "insert", "pop", "popleft", "sort", "update"}
FALLBACK = PACKAGE / "models" / "fallback"  # which adapts transformers' modules by their attributes
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py")) if not path.is_relative_to(FALLBACK)]


def attributes_of(tree: ast.AST) -> set[str]:
    """All that the classes of a module have: slots, class-level names and what their methods assign to `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
            found.update(one.target.id for one in names if isinstance(one.target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def written(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and attribute of every write to an object other than `self`: `x.a = `, `x.a[...] = `, `x.a.append(...)`."""
    for node in ast.walk(tree):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = node
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if isinstance(target, ast.Attribute) and not is_self(target.value):
            yield node.lineno, target.attr


def private_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every `x._name` where x is not `self`, but for Python's own names and `os._exit`."""
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not is_self(node.value)
        if is_private and not node.attr.startswith("__") and node.attr != "_exit":
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_class_is_written_by_its_own_module(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = attributes_of(tree) | FOREIGN
    assert [f"{path.name}:{line} {name}" for line, name in written(tree) if name not in own] == []
    assert [f"{path.name}:{line} {name}" for line, name in private_reads(tree) if name not in own] == []


def test_a_foreign_write_is_found() -> None:
    tree = ast.parse("rows.total[row] = 1\nrunning.kv.version += 1\nself.rows.sequences.append(2)\nkv._pool.take(1)")
    assert {name for _, name in written(tree)} == {"version", "total", "sequences"}
    assert [name for _, name in private_reads(tree)] == ["_pool"]
