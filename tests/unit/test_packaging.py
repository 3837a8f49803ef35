"""What a fresh machine relies on: the package's metadata, the scripts, and how the server's binary is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import TritonInstall, find_triton_server, install_launcher

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("extra", ["server", "client", "cuda", "trtllm", "openai", "dev"])
def test_extras_exist(extra: str) -> None:
    assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE)


def test_server_extra_keeps_numpy_below_2() -> None:
    server = re.search(r"^server = (\[.*\])", PYPROJECT, re.MULTILINE)
    assert server is not None
    assert "nvidia-pytriton==0.7.0" in server[1]
    assert "numpy>=1.26,<2" in server[1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_importing_the_package_loads_no_torch() -> None:
    modules = "minisgl_backend, minisgl_backend.host.server_supervisor, minisgl_backend.engine.build"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_server_on_path_wins(tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    install = find_triton_server(str(tmp_path), site_packages=tmp_path)
    assert install.binary == binary
    assert install.command(["--x"]) == [str(binary), "--x"]


def test_the_launcher_is_not_taken_for_a_server(tmp_path: Path) -> None:
    install_launcher(tmp_path / "tritonserver")
    with pytest.raises(ConfigError, match=r"scripts/setup\.sh"):
        find_triton_server(str(tmp_path), site_packages=tmp_path)
    real = tmp_path / "real"
    real.mkdir()
    (real / "tritonserver").write_bytes(b"\x7fELF")
    (real / "tritonserver").chmod(0o755)
    assert find_triton_server(f"{tmp_path}{os.pathsep}{real}").binary == real / "tritonserver"


def test_the_wheel_gets_a_backend_directory(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = tmp_path / "site-packages" / "pytriton" / "tritonserver"
    for path in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        f"python_backend_stubs/{version}/triton_python_backend_stub",
    ):
        (server / path).parent.mkdir(parents=True, exist_ok=True)
        (server / path).touch()
    for _ in range(2):  # a second start finds the links in place
        try:
            install = find_triton_server(
                "", site_packages=tmp_path / "site-packages", state_directory=tmp_path / "state"
            )
        except ConfigError as error:
            pytest.skip(str(error))
    assert install.backend_directory is not None
    names = sorted(path.name for path in (install.backend_directory / "python").iterdir())
    assert names == ["libtriton_python.so", "triton_python_backend_stub"]
    assert install.command([])[1:] == [f"--backend-directory={install.backend_directory}"]
    assert install.command(["--backend-directory=/other"])[1:] == ["--backend-directory=/other"]


def test_a_wheel_without_a_stub_for_this_python_says_so(tmp_path: Path) -> None:
    server = tmp_path / "pytriton" / "tritonserver"
    for path in ("bin/tritonserver", "python_backend_stubs/3.8/triton_python_backend_stub"):
        (server / path).parent.mkdir(parents=True)
        (server / path).touch()
    with pytest.raises(ConfigError, match=r"has them for 3\.8"):
        find_triton_server("", site_packages=tmp_path, state_directory=tmp_path / "state")


def test_the_environment_puts_our_python_first(tmp_path: Path) -> None:
    install = TritonInstall(tmp_path / "tritonserver", tmp_path, (tmp_path / "libs",), tmp_path / "bin")
    environment = install.environment({"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/opt/lib", "OTHER": "kept"})
    assert environment["PATH"] == f"{tmp_path / 'bin'}{os.pathsep}/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path / 'libs'}{os.pathsep}/opt/lib"
    assert environment["OTHER"] == "kept"
