"""Imports xgrammar without torch and transformers, which it imports but does not need to compile: 0.4 s, not 2 to 15.

While xgrammar is imported, stub modules replace these packages. Every attribute of a stub is an empty class, which is
enough for annotations, base classes and constants. Later imports get the real packages.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from minisgl_backend.process.absent import absent

UNUSED_PACKAGES = ("torch", "transformers")
# tvm-ffi, through which xgrammar calls its library, must not build its torch extension; transformers must not warn.
ENVIRONMENT = {"TVM_FFI_DISABLE_TORCH_C_DLPACK": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def import_xgrammar(stubbed: Sequence[str]) -> ModuleType:
    """xgrammar, imported with stubs for the packages `stubbed`, except those that are already imported. Meanwhile no
    other thread may import them. Raises whatever xgrammar's modules raise if a stub does not suffice."""
    if "xgrammar" in sys.modules:
        return sys.modules["xgrammar"]
    missing = [name for name in stubbed if name not in sys.modules]
    # tvm-ffi, which older versions do not use, handles missing packages itself; a stub class would mislead it.
    with absent(missing), contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")
    finder = _StubFinder(missing)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("xgrammar")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]


class _StubFinder(MetaPathFinder, Loader):
    """Finds stubs for packages and all their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _stub_class(name)


class _StubMeta(type):
    def __getattr__(cls, name: str) -> Any:
        return _stub_class(name)


def _stub_class(name: str) -> Any:
    if name.startswith("__"):  # Python looks these up in every module and class
        raise AttributeError(name)
    return _StubMeta(name, (_StubClass,), {})


class _StubClass(metaclass=_StubMeta):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, decorated: Any = None, *_: Any, **__: Any) -> Any:
        return decorated
