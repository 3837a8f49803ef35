"""No module imports itself by way of others, for type checkers neither: both packages have no circle of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The package offers LLM under its own name, loaded when it is first used.
FACADE = ("minisgl_backend", "minisgl_backend.llm")


def modules_of(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in functions: what runs when a module is imported, and what a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from outside_functions(node)


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in outside_functions(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            within = above[: len(above) + 1 - node.level] if node.level else []
            module = ".".join([*within, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in known else module)
    return {one for one in found & known.keys() if one != name and (name, one) != FACADE}


def circles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules each of which leads to all others of its group."""
    left = dict(graph)
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    reached = {name: reachable(left, name) for name in left}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in left}
    return sorted(sorted(group) for group in groups if group)


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = (graph.get(todo.pop(), set()) & graph.keys()) - found
        found |= new
        todo += new
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules_of(ROOT, ("minisgl_backend", "client"))
    assert len(known) > 500
    assert circles_of({name: imports_of(name, path, known) for name, path in known.items()}) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    for name, text in {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.b import B\n",
        "b": "class B:\n    from . import c\n",
        "c": "import house.a\n",
        "d": "def late():\n    import house.e\n",
        "e": "from house import d\n",
    }.items():
        (tmp_path / "house" / f"{name}.py").write_text(text)
    known = modules_of(tmp_path, ("house",))
    graph = {name: imports_of(name, path, known) for name, path in known.items()}
    assert circles_of(graph) == [["house.a", "house.b", "house.c"]]
