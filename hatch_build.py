"""Hatchling's hooks: the package's description is the README without what leads nowhere outside of a checkout, and a
wheel holds builds of the CPU's kernels where the machine has a compiler for them."""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|mailto:)[^)]*\)")
_TAG = "py3-none-manylinux_2_35_x86_64"  # builds need GCC 11's library, which glibc 2.35's systems have
_WHERE = "The pages that are named here are in the source archive, in the folder `docs`.\n"


class Readme(MetadataHookInterface):
    """Gives the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text)}


def description(readme: str) -> str:
    """The README with the words of relative links and without relative pictures; code stays as it is."""
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    plain = [part if part.startswith("```") else _LINK.sub(r"\1", _PICTURE.sub("", part)) for part in parts]
    return f"{''.join(plain).rstrip()}\n\n{_WHERE}"


class CpuKernels(BuildHookInterface):  # type: ignore[type-arg]  # of its builder's config, which is not looked at
    """Builds for every instruction set, in `kernels/cpu/packed`. Without g++, on another machine and for an editable
    install the wheel is pure: then kernels are compiled at the first start."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = shutil.which("g++")
        if version != "standard" or compiler is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        sources = _module(Path(self.root, "minisgl_backend", "kernels", "cpu", "sources.py"))
        self._folder = tempfile.TemporaryDirectory(prefix="minisgl-")
        found = {}
        try:
            for one in sources.INSTRUCTION_SETS:
                folder = Path(self._folder.name, one.name)
                folder.mkdir()
                built = sources.build((compiler,), one, folder, "generic", _run)
                found[str(built)] = f"minisgl_backend/kernels/cpu/packed/{sources.packed_name(one)}"
        except subprocess.CalledProcessError as error:
            logging.getLogger(__name__).warning("a wheel without CPU kernels: %s", error.stderr[-500:])
            return
        build_data["force_include"].update(found)
        build_data["pure_python"] = False
        build_data["tag"] = _TAG

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
