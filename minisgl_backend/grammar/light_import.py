"""xgrammar without torch and transformers, which it imports and compiling never calls: 0.4 s instead of 2 to 15.

While xgrammar is imported, the packages that are to be left out are modules whose every attribute is an empty class:
enough for the annotations, base classes and constants of its modules. What is imported later is real.
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

UNUSED = ("torch", "transformers")
# tvm-ffi, through which xgrammar calls its library, is to build nothing for torch, and transformers needs none.
ENVIRONMENT = {"TVM_FFI_DISABLE_TORCH_C_DLPACK": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def import_xgrammar(without: Sequence[str]) -> ModuleType:
    """xgrammar, imported without those of the packages `without` that nobody has imported yet. Meanwhile no other
    thread may import them. Raises whatever xgrammar's modules do with what is not there."""
    if "xgrammar" in sys.modules:
        return sys.modules["xgrammar"]
    missing = [name for name in without if name not in sys.modules]
    # tvm-ffi, which older versions have not, can do without; a class that is no tensor's would mislead it.
    with absent(missing), contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")
    finder = _StandIns(missing)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("xgrammar")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
            del sys.modules[name]


class _StandIns(MetaPathFinder, Loader):
    """Finds packages and all that is below them, none of which is looked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _empty_class(name)


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        return _empty_class(name)


def _empty_class(name: str) -> Any:
    if name.startswith("__"):  # what Python asks of every module and class
        raise AttributeError(name)
    return _Attributes(name, (_Empty,), {})


class _Empty(metaclass=_Attributes):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, decorated: Any = None, *_: Any, **__: Any) -> Any:
        return decorated
