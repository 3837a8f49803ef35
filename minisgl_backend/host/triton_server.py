"""Finds a `tritonserver` and the environment that its Python backend needs.

A binary on PATH (NVIDIA's container) takes precedence over the one inside the wheel `nvidia-pytriton`. Run as a
program, this module becomes that binary: `python -m minisgl_backend.host.triton_server --model-repository DIR`. The
package's entry point `tritonserver` is the same.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.ipc.private import make_private
from minisgl_backend.process.installed import version_of
from minisgl_backend.process.resources import raise_file_limit, raise_stack_limit, torch_defaults

DIE_WITH_PARENT = "--die-with-parent"

_STUB_NAME = "triton_python_backend_stub"
_HELP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class TritonInstall:
    """One usable `tritonserver`: the binary, and the arguments and environment that it needs."""

    binary: Path
    backend_directory: Path | None  # None: the binary knows its own
    library_directories: tuple[Path, ...]  # precede LD_LIBRARY_PATH
    python_directory: Path  # contains the `python3` of the stubs; goes first on PATH

    @cached_property
    def options(self) -> frozenset[str]:
        """Its command-line options, from its help; empty if it prints no help."""
        return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", self._output([str(self.binary), "--help"])))

    @cached_property
    def version(self) -> str | None:
        """Triton's own version, as the server reports it; None if it does not. Takes a tenth of a second."""
        nothing = ["--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"]
        # With a repository that does not exist it ends after printing its version.
        command = [str(self.binary), "--model-repository=/nonexistent", *nothing]
        return next(iter(re.findall(r"\bserver_version\s*\|\s*(\S+)", self._output(command))), None)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The server's command line; a `--backend-directory` among `arguments` overrides the wheel's."""
        command = [str(self.binary)]
        given = any(argument.split("=", 1)[0] == "--backend-directory" for argument in arguments)
        if self.backend_directory is not None and not given:
            command.append(f"--backend-directory={self.backend_directory}")
        return command + list(arguments)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with PATH and LD_LIBRARY_PATH set so that every stub runs this Python."""
        environment = dict(base)
        environment["PATH"] = _prepend(self.python_directory, base.get("PATH", os.defpath))
        libraries = os.pathsep.join(str(directory) for directory in self.library_directories)
        if libraries:
            environment["LD_LIBRARY_PATH"] = _prepend(libraries, base.get("LD_LIBRARY_PATH", ""))
        return environment

    def _output(self, command: list[str]) -> str:
        """The server's output with these arguments; empty if it fails."""
        try:
            reply = subprocess.run(
                command,
                env=self.environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_HELP_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return reply.stdout.decode(errors="replace")


def find_triton_server(
    search_path: str | None = None, *, site_packages: Path | None = None, state_directory: Path | None = None
) -> TritonInstall:
    """The server of this machine. `search_path` defaults to PATH, the other two to those of the running Python.

    `state_directory` receives a few links (the backend directory that the wheel lacks); a private folder is used if it
    is not writable. Raises ConfigError if there is no server, or if the wheel has no stub for this Python.
    """
    python_directory = Path(sys.executable).parent
    on_path = _find_on_path(os.environ.get("PATH", "") if search_path is None else search_path)
    if on_path is not None:
        # A container's own Python backend finds libpython by itself; only the Python to run is ours.
        return TritonInstall(on_path, None, (), python_directory)
    site_packages = site_packages or Path(sysconfig.get_path("platlib"))
    state_directory = state_directory or Path(sys.prefix) / "share" / "minisgl" / "tritonserver"
    return _install_from_wheel(site_packages, state_directory, python_directory)


def find_libpython(libdir: str | None = None) -> Path | None:
    """The shared library of the running Python that the wheel's stub links against; None if there is none.

    The interpreter's own folder comes first (pyenv, uv and conda builds keep it outside the loader's search path), then
    the loader's. The loader's copy has no path here, so its bare name is returned.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    own = Path(libdir or sysconfig.get_config_var("LIBDIR") or "/nonexistent") / name
    if own.is_file():
        return own
    try:
        loader = subprocess.run(
            # In a separate process: a second libpython must not be loaded into this one.
            [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"],
            capture_output=True,
            check=False,
        )
    except OSError as error:  # no memory or process left
        raise ConfigError(f"no process can be started to look for {name}: {error}") from error
    return Path(name) if loader.returncode == 0 else None


def is_plain_path(path: Path | str) -> bool:
    """False for a path that a shell would split: the Python backend passes paths to one without quotes."""
    return re.fullmatch(r"[\w@%+=:,./-]+", str(path), re.ASCII) is not None


def check_ascii(what: str, path: Path | str) -> None:
    """Raises ConfigError for a path that no Python model could open: its interpreter always uses the C locale."""
    if not str(path).isascii():
        raise ConfigError(
            f"{what} is in {str(path)!r}: models of Triton's Python backend cannot open paths with letters beyond "
            "ASCII; move it"
        )


def ascii_links(folder: Path) -> Path:
    """A private folder with links to a model's files, whose path `check_ascii` accepts. Not one link to the folder:
    code that resolves the link would get the original path. Of a GGUF file: a link to it, beside those of
    its parts and of its generation_config.json."""
    from minisgl_backend.weights.gguf_index import is_gguf, name_of, parts_of  # few servers need it

    links = _private_folder("model", folder)
    if is_gguf(folder):
        name = name_of(folder)
        for part in parts_of(folder):
            _link(part, links / part.name.replace(name, "model", not name.isascii()))
        if (beside := folder.with_name("generation_config.json")).is_file():
            _link(beside, links / beside.name)
        return links / folder.name.replace(name, "model", not name.isascii())
    for entry in links.iterdir():
        if not (folder / entry.name).exists():
            entry.unlink()
    for entry in folder.iterdir():
        _link(entry, links / entry.name)
    return links


def main() -> None:
    """Replaces this process by the server, with the arguments given.

    A first argument `--die-with-parent` is not the server's: with it the server ends when the process that started it
    ends, in whatever way.
    """
    arguments = sys.argv[1:]
    try:
        check_ascii("the installation", sys.prefix)
        check_ascii("the package", Path(__file__).resolve().parents[1])
        install = find_triton_server()
        _check_repositories(arguments)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if arguments[:1] == [DIE_WITH_PARENT]:
        arguments = arguments[1:]
        _die_with_parent()
    raise_file_limit()
    raise_stack_limit()
    command = install.command(arguments)
    os.execvpe(command[0], command, install.environment({**torch_defaults(os.environ), **os.environ}))


def _check_repositories(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a model repository whose Python models the server could never start."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-repository", "--model-store", dest="values", action="append", default=[])
    for value in parser.parse_known_args(arguments)[0].values:
        check_ascii("--model-repository", Path(value).resolve())
        if not is_plain_path(value):
            raise ConfigError(
                f"--model-repository is {value!r}: Triton's Python backend starts no model from a path with spaces or "
                "signs of the shell; give it a link to the folder (ln -s), or use minisgl serve, which makes one"
            )


def _die_with_parent() -> None:
    # Survives the following exec.
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def _find_on_path(search_path: str) -> Path | None:
    for directory in filter(None, search_path.split(os.pathsep)):
        found = shutil.which("tritonserver", path=directory)
        # This module's own entry point has the same name and would call itself.
        if found is not None and not _is_launcher(Path(found)):
            return Path(found)
    return None


def _is_launcher(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!" and b"minisgl_backend" in file.read(2000)


def _install_from_wheel(site_packages: Path, state_directory: Path, python_directory: Path) -> TritonInstall:
    server = site_packages / "pytriton" / "tritonserver"
    binary = server / "bin" / "tritonserver"
    if not binary.is_file():
        raise ConfigError(
            "no tritonserver: none on PATH, and the wheel nvidia-pytriton is not installed; run scripts/setup.sh "
            "in a checkout, else pip install 'minisgl-backend[server]', or use NVIDIA's container"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / _STUB_NAME
    if not stub.is_file():
        known = ", ".join(sorted(path.parent.name for path in server.glob(f"python_backend_stubs/*/{_STUB_NAME}")))
        raise ConfigError(f"nvidia-pytriton has no stub for Python {version}; it has them for {known or 'none'}")
    numpy_version = version_of("numpy")
    if numpy_version is not None and not numpy_version.startswith(("0.", "1.")):
        raise ConfigError(
            f"nvidia-pytriton's Python backend needs NumPy below 2, and {numpy_version} is installed; "
            "pip install 'numpy<2', or use NVIDIA's container"
        )
    libpython = find_libpython()
    if libpython is None:
        raise ConfigError(
            f"the Python backend needs libpython{version}.so.1.0, which this machine lacks; "
            f"install it (Debian, Ubuntu: apt-get install libpython{version})"
        )
    python_backend = [*(server / "backends" / "python").iterdir(), stub]
    try:
        _link_state(state_directory, python_backend, libpython)
    except OSError:  # another user's installation, which this user cannot change
        state_directory = _private_folder("tritonserver", state_directory)
        _link_state(state_directory, python_backend, libpython)
    libraries = [site_packages / "nvidia_pytriton.libs"]
    if libpython.is_absolute():
        libraries.append(state_directory / "lib")
    return TritonInstall(binary, _plain_link(state_directory / "backends"), tuple(libraries), python_directory)


def _link_state(directory: Path, python_backend: Sequence[Path], libpython: Path) -> None:
    for source in python_backend:
        _link(source, directory / "backends" / "python" / source.name)
    if libpython.is_absolute():
        # Links to the single library: its folder may contain others that must not be loaded.
        _link(libpython, directory / "lib" / libpython.name)


def _plain_link(directory: Path) -> Path:
    """`directory`, or a link to it in a private folder if its own path needs quoting in a shell."""
    if is_plain_path(directory):
        return directory
    folder = _private_folder("backends", directory)
    _link(directory, folder / directory.name)
    return folder / directory.name


def _private_folder(kind: str, instead_of: Path) -> Path:
    """This user's folder instead of one that cannot be used."""
    digest = hashlib.sha256(os.fsencode(instead_of)).hexdigest()[:10]
    folder = Path("/tmp", f"minisgl-{os.getuid()}-{kind}-{digest}")
    make_private(folder)
    return folder


def _link(source: Path, target: Path) -> None:
    if target.is_symlink() and os.readlink(target) == str(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Created under another name and renamed: two servers that start at once never see a missing file.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.symlink_to(source)
    temporary.replace(target)


def _prepend(first: Path | str, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


if __name__ == "__main__":
    main()
