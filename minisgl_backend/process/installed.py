"""What the package requires, by its own metadata, and which of it is installed. Standard library only.

A checkout that was never installed has no metadata; pyproject.toml then says the same.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError

DISTRIBUTION = "minisgl-backend"


@dataclass(frozen=True)
class Requirement:
    """A distribution that the package, or one of its extras, requires."""

    text: str  # as pip takes it: NAME[EXTRAS]SPECIFIER
    name: str
    specifier: str  # "": any version
    installed: str | None  # the version; None: not installed

    @property
    def fits(self) -> bool:
        """Whether the installed version satisfies the specifier."""
        return self.installed is not None and _contains(self.specifier, self.installed)


def requirements_of(extra: str = "") -> list[Requirement]:
    """The requirements of an extra, or of the package itself, that apply to this machine.

    Raises importlib.metadata.PackageNotFoundError where the package is not installed and pyproject.toml cannot be read.
    """
    found = []
    for line in _declared(extra):
        text, _, marker = (part.strip() for part in line.partition(";"))
        if not _applies(marker, extra):
            continue
        parts = re.fullmatch(r"([\w.-]+)(\[[^]]*\])?\s*\(?([^)]*)\)?", text)
        if parts is not None and parts[1] != DISTRIBUTION:  # one extra may include another
            found.append(Requirement(text, parts[1], parts[3].strip(), version_of(parts[1])))
    return found


def check_engine_packages() -> None:
    """Raises ConfigError if the engine's packages are missing, with the command that installs them."""
    try:
        missing = [requirement.name for requirement in requirements_of("engine") if requirement.installed is None]
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH: its imports will say what is missing
        return
    if missing:
        raise ConfigError(
            f"the engine needs {', '.join(missing)}: pip install 'minisgl-backend[serve]' to serve, "
            "'minisgl-backend[engine]' for LLM alone; without a GPU install torch from "
            "https://download.pytorch.org/whl/cpu before"
        )


def version_of(distribution: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _declared(extra: str) -> list[str]:
    """NAME[EXTRAS]SPECIFIER; MARKER, as in the metadata."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        project = _pyproject()
        return list(project.get("optional-dependencies", {}).get(extra, []) if extra else project["dependencies"])
    return [line for line in lines if _extra_of(line.partition(";")[2]) == extra]


def _pyproject() -> dict[str, Any]:
    """The table `project` of the checkout's pyproject.toml."""
    try:
        toml = importlib.import_module("tomllib")  # Python 3.11 and later
        text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    except (ImportError, OSError):
        raise metadata.PackageNotFoundError(DISTRIBUTION) from None
    project: dict[str, Any] = toml.loads(text)["project"]
    return project


def _extra_of(marker: str) -> str:
    named = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
    return named[1] if named else ""


def _applies(marker: str, extra: str) -> bool:
    """Whether a marker applies here; true if that cannot be determined."""
    markers = _packaging("markers")
    return not marker or markers is None or bool(markers.Marker(marker).evaluate({"extra": extra}))


def _contains(specifier: str, version: str) -> bool:
    """Whether the specifier includes a version; true if that cannot be determined."""
    specifiers = _packaging("specifiers")
    return specifiers is None or bool(specifiers.SpecifierSet(specifier).contains(version, prereleases=True))


def _packaging(module: str) -> Any:
    """None where that package is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(f"packaging.{module}")
    return None
