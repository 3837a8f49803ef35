"""Finds NVIDIA's perf_analyzer, or fetches it, and runs it.

PyPI's package `perf-analyzer` is an empty placeholder; the binary is inside the wheels of tritonclient up to 2.60. It
needs two libraries that few machines have and that the wheel nvidia-pytriton brings.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console import CommandError

ENVIRONMENT_VARIABLE = "MINISGL_PERF_ANALYZER"
# The last one that runs on glibc 2.35 to 2.37 and on all later ones too.
_VERSION = "2.48.0"
# soname -> how the wheel nvidia-pytriton names its copy
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


class PerfAnalyzerError(CommandError):
    """No perf_analyzer runs here, or it failed; the message is one line."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """A perf_analyzer that runs on this machine."""

    binary: Path
    library_directory: Path | None = None  # precedes LD_LIBRARY_PATH

    def run(self, arguments: Sequence[str], timeout: float) -> str:
        """Its output. Raises PerfAnalyzerError when it fails or takes longer than `timeout` seconds."""
        command = [str(self.binary), *arguments]
        try:
            done = subprocess.run(
                command,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PerfAnalyzerError(f"perf_analyzer did not end within {timeout:g} s") from None
        except OSError as error:
            raise PerfAnalyzerError(f"{self.binary} does not start: {error}") from None
        if done.returncode != 0:
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            telling = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
            raise PerfAnalyzerError(f"perf_analyzer: {(telling or lines or [f'exit status {done.returncode}'])[-1]}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.library_directory is not None:
            rest = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(self.library_directory), rest)))
        return environment


def find_perf_analyzer(cache: Path | None = None) -> PerfAnalyzer:
    """The one named by MINISGL_PERF_ANALYZER, otherwise the one on PATH, otherwise the cached one, fetched if missing.

    Raises PerfAnalyzerError.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE) or shutil.which("perf_analyzer")
    if named:
        return _checked(PerfAnalyzer(Path(named)))
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise PerfAnalyzerError(
            f"perf_analyzer exists for Linux on x86-64 only; set {ENVIRONMENT_VARIABLE} to one that runs here"
        )
    directory = (cache or _default_cache()) / f"perf_analyzer-{_VERSION}"
    binary = directory / "perf_analyzer"
    if not binary.is_file():
        _fetch(binary)
    return _checked(PerfAnalyzer(binary, _link_libraries(directory / "lib")))


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl"


def _fetch(binary: Path) -> None:
    requirement = f"tritonclient=={_VERSION}"
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        # Another Python or platform tag of the host does not matter: only the binary inside is used.
        pip += ["--only-binary=:all:", "--dest", directory, requirement]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = list(Path(directory).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise PerfAnalyzerError(
                f"cannot fetch perf_analyzer (pip download {requirement}: {reason}); "
                f"put one on PATH or set {ENVIRONMENT_VARIABLE}"
            )
        _unpack(wheels[0], binary)


def _unpack(wheel: Path, binary: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/perf_analyzer")]
        if not members:
            raise PerfAnalyzerError(f"{wheel.name} holds no perf_analyzer")
        temporary = binary.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(archive.read(members[0]))
    temporary.chmod(0o755)
    temporary.replace(binary)


def _link_libraries(directory: Path) -> Path:
    """Links the wheel's libraries under the names that the binary needs; without the wheel the system's must do."""
    directory.mkdir(parents=True, exist_ok=True)
    source = Path(sysconfig.get_path("platlib")) / "nvidia_pytriton.libs"
    for soname, pattern in _LIBRARIES.items():
        found = sorted(source.glob(pattern))
        link = directory / soname
        if found and not (link.is_symlink() and link.exists()):
            temporary = directory / f".{soname}.{os.getpid()}"
            temporary.symlink_to(found[0])
            temporary.replace(link)
    return directory


def _checked(analyzer: PerfAnalyzer) -> PerfAnalyzer:
    try:
        analyzer.run(["--version"], timeout=30)
    except PerfAnalyzerError as error:
        hint = ""
        if "shared librar" in str(error):
            hint = f"; it needs {' and '.join(_LIBRARIES)}: pip install nvidia-pytriton brings both"
        raise PerfAnalyzerError(f"{analyzer.binary} does not run here: {error}{hint}") from None
    return analyzer
