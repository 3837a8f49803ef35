"""What the package asks for, by its own metadata, and which of it is installed. Standard library only."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata

DISTRIBUTION = "minisgl-backend"


@dataclass(frozen=True)
class Requirement:
    """One distribution that the package, or one of its extras, asks for."""

    text: str  # as pip takes it: NAME[EXTRAS]SPECIFIER
    name: str
    specifier: str  # "": any version
    installed: str | None  # the version; None: it is missing

    @property
    def fits(self) -> bool:
        """Whether the installed version is one of those asked for."""
        return self.installed is not None and _contains(self.specifier, self.installed)


def requirements_of(extra: str = "") -> list[Requirement]:
    """Those of an extra, or of the package itself, that this machine needs.

    Raises importlib.metadata.PackageNotFoundError where the package is not installed.
    """
    found = []
    for line in metadata.requires(DISTRIBUTION) or []:
        text, _, marker = (part.strip() for part in line.partition(";"))
        if _extra_of(marker) != extra or not _applies(marker, extra):
            continue
        parts = re.fullmatch(r"([\w.-]+)(\[[^]]*\])?\s*\(?([^)]*)\)?", text)
        if parts is not None:
            found.append(Requirement(text, parts[1], parts[3].strip(), version_of(parts[1])))
    return found


def version_of(distribution: str) -> str | None:
    """The installed version; None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra_of(marker: str) -> str:
    named = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
    return named[1] if named else ""


def _applies(marker: str, extra: str) -> bool:
    """Whether a marker holds here; yes where that cannot be told."""
    if not marker:
        return True
    try:
        markers = importlib.import_module("packaging.markers")
    except ImportError:
        return True
    return bool(markers.Marker(marker).evaluate({"extra": extra}))


def _contains(specifier: str, version: str) -> bool:
    """Whether a version is one of those specified; yes where that cannot be told."""
    try:
        specifiers = importlib.import_module("packaging.specifiers")
    except ImportError:
        return True
    return bool(specifiers.SpecifierSet(specifier).contains(version, prereleases=True))
