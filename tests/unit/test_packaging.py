"""What a fresh machine relies on: the package's metadata, the scripts, and how the server's binary is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minisgl_backend
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import triton_server
from minisgl_backend.host.triton_server import TritonInstall, find_triton_server, is_plain_path
from minisgl_backend.process.resources import SERVER_STACK_BYTES, stacks_are_free

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("extra", ["server", "client", "cuda", "trtllm", "openai", "dev", "frameworks"])
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


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Path:
    """As much of a checkout as answers about options, in a path with a space; its setup only says that it ran."""
    clone = tmp_path / "a clone"
    for path in [
        *(
            path
            for room in ("", "host/", "host/options/", "ipc/", "models/", "parsers/", "process/", "weights/")
            for path in ROOT.glob(f"minisgl_backend/{room}*.py")
        ),
        ROOT / "scripts/serve.sh",
    ]:
        target = clone / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (clone / "scripts" / "setup.sh").write_text('echo "setup $*"; exit 7\n')
    return clone


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--help",), 0, "--max-running-requests"),
        (("--version",), 0, f"minisgl-backend {minisgl_backend.__version__}"),
        (("--page-size", "3"), 2, "page_size is 3; allowed: a power of two"),
        (("--typo",), 2, "--typo"),
        (("/no/such/model",), 2, "/no/such/model"),
        (("--page-size", "16"), 7, "setup serve"),
        (("smollm2",), 7, "setup serve"),
    ],
)
def test_options_are_answered_before_anything_is_installed(
    fresh_clone: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    command = ["bash", str(fresh_clone / "scripts" / "serve.sh"), *arguments]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "XDG_CACHE_HOME": str(fresh_clone)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done
    assert ("setup" in done.stdout) == (code == 7)


def test_setup_has_modes() -> None:
    def setup(mode: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "scripts/setup.sh"), mode], capture_output=True, text=True, check=False
        )

    assert re.fullmatch(r"[0-9a-f]{64}\n", setup("fingerprint").stdout)
    wrong = setup("everything")
    assert (wrong.returncode, wrong.stderr) == (1, "[setup] error: the mode is 'everything'; allowed: serve, dev\n")


@pytest.mark.parametrize(("says", "has_gpu"), [("GPU 0: H100", True), ("no GPU was found", False)])
def test_setup_sees_every_gpu(tmp_path: Path, says: str, has_gpu: bool) -> None:
    """Also where the list is long and comes slowly."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/bash\necho '{says}'\nsleep 0.2\nprintf '  MIG %s\\n' {{1..99}}\n")
    tool.chmod(0o755)
    (line,) = re.findall(r"^has_gpu\(\) .*", (ROOT / "scripts/setup.sh").read_text(), re.MULTILINE)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{line}\nhas_gpu"], env=environment, check=False)
    assert (found.returncode == 0) == has_gpu


def test_setup_says_what_it_waits_for_and_shows_what_failed(tmp_path: Path) -> None:
    pip = tmp_path / "pip"
    wheel = "https://host/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (189.2 MB)"
    pip.write_text(f"echo 'Collecting torch==2.13.0'\necho '  Downloading {wheel}'\nsleep 2.5\nexit $1\n")
    functions = re.findall(r"^(?:step|progress)\(\) \{\n.*?^\}", (ROOT / "scripts/setup.sh").read_text(), re.M | re.S)
    assert len(functions) == 2
    code = "\n".join(["bold='' plain='' venv=", 'say() { echo "[setup] $*" >&2; }', *functions])
    calls = f"step installing bash {pip} 0; step 'installing more' bash {pip} 3 || echo code $?"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{code}\n{calls}"],
        env={"PATH": "/usr/bin:/bin", "PROGRESS_SECONDS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^\[setup\] \.\.\. \d s: downloading torch \(189\.2 MB\), package 1$", done.stderr, re.M), done
    assert done.stdout == "code 3\n"
    assert done.stderr.endswith(f"Collecting torch==2.13.0\n  Downloading {wheel}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Resolved 83 packages in 2.11s", "fetching 83 packages"),
        ("Resolved 83 packages in 2.11s\\nDownloading torch (182.3MiB)", "downloading torch (182.3MiB)"),
        ("Downloading torch (182.3MiB)\\nPrepared 82 packages in 9s", "installing 82 packages"),
    ],
)
def test_setup_reads_what_uv_says(tmp_path: Path, words: str, said: str) -> None:
    output = tmp_path / "output"
    output.write_text(words.replace("\\n", "\n") + "\n")
    (progress,) = re.findall(r"^progress\(\) \{\n.*?^\}", (ROOT / "scripts/setup.sh").read_text(), re.M | re.S)
    code = f"bold='' plain='' venv=\nsay() {{ echo \"$*\"; exit; }}\n{progress}\nprogress {output}"
    done = subprocess.run(
        ["bash", "-c", code],
        env={"PATH": "/usr/bin:/bin", "PROGRESS_SECONDS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(f"s: {said}")


def test_importing_the_package_needs_nothing_installed() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import minisgl_backend"], check=True, cwd=ROOT)


def test_importing_the_package_loads_no_torch() -> None:
    modules = "minisgl_backend, minisgl_backend.host.server_supervisor, minisgl_backend.engine.build"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_command_needs_no_extra_to_serve() -> None:
    """`minisgl serve`, `init` and `doctor` where the extra `client` is not installed."""
    missing = ["aiohttp", "prometheus_client", "tritonclient"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import client.cli"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_server_on_path_wins(tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    install = find_triton_server(str(tmp_path), site_packages=tmp_path)
    assert install.binary == binary
    assert install.command(["--x"]) == [str(binary), "--x"]


ENTRY_POINT = """#!{python}
import sys
from minisgl_backend.host.triton_server import main
if __name__ == "__main__":
    sys.exit(main())
"""


def entry_point(folder: Path) -> Path:
    """The script that pip makes of the package's entry point `tritonserver`."""
    assert re.search(r'^tritonserver = "minisgl_backend\.host\.triton_server:main"$', PYPROJECT, re.MULTILINE)
    script = folder / "tritonserver"
    script.write_text(ENTRY_POINT.format(python=sys.executable))
    script.chmod(0o755)
    return script


def test_the_entry_point_is_not_taken_for_a_server(tmp_path: Path) -> None:
    entry_point(tmp_path)
    with pytest.raises(ConfigError, match=r"scripts/setup\.sh"):
        find_triton_server(str(tmp_path), site_packages=tmp_path)
    real = tmp_path / "real"
    real.mkdir()
    (real / "tritonserver").write_bytes(b"\x7fELF")
    (real / "tritonserver").chmod(0o755)
    assert find_triton_server(f"{tmp_path}{os.pathsep}{real}").binary == real / "tritonserver"


def test_the_entry_point_hands_over_to_a_server_further_down_path(tmp_path: Path) -> None:
    """As in NVIDIA's container. What it starts may have large stacks, and waits passively where it computes."""
    script = entry_point(tmp_path)
    real = tmp_path / "real"
    real.mkdir()
    (real / "tritonserver").write_text('#!/bin/sh\necho "$@" && ulimit -s && echo $OMP_WAIT_POLICY\n')
    (real / "tritonserver").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["PATH"] = os.pathsep.join([str(tmp_path), str(real), "/usr/bin", "/bin"])
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([script, "--model-repository=r"], env=environment, capture_output=True, text=True, check=True)
    said, stack, policy = done.stdout.splitlines()
    assert said == "--model-repository=r"
    assert policy == "passive"
    if stacks_are_free():
        assert int(stack) * 1024 >= SERVER_STACK_BYTES


def test_a_repository_that_no_shell_takes_whole_is_refused_in_one_line(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "tritonserver").write_bytes(b"\x7fELF")
    (real / "tritonserver").chmod(0o755)
    for path, words in (("my models", "spaces"), ("mödels", "beyond ASCII")):
        done = subprocess.run(
            [entry_point(tmp_path), "--model-repository", str(tmp_path / path)],
            env={**os.environ, "PATH": str(real), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_wheel_under_an_odd_path_gets_a_link_that_shells_take_whole(tmp_path: Path) -> None:
    site_packages = wheel(tmp_path / "a b" / "site-packages")
    try:
        install = find_triton_server("", site_packages=site_packages, state_directory=tmp_path / "a b" / "state")
    except ConfigError as error:
        pytest.skip(str(error))
    assert install.backend_directory is not None
    try:
        assert is_plain_path(install.backend_directory)
        assert (install.backend_directory / "python" / "libtriton_python.so").exists()
    finally:
        shutil.rmtree(install.backend_directory.parent)


def test_numpy_2_is_refused_where_the_wheel_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_server, "version_of", lambda name: "2.4.1")
    with pytest.raises(ConfigError, match=r"NumPy below 2, and 2\.4\.1 is installed"):
        find_triton_server("", site_packages=wheel(tmp_path), state_directory=tmp_path / "state")


def wheel(site_packages: Path) -> Path:
    """What find_triton_server looks for in the wheel."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        f"python_backend_stubs/{version}/triton_python_backend_stub",
    ):
        file = site_packages / "pytriton" / "tritonserver" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return site_packages


def test_the_wheel_gets_a_backend_directory(tmp_path: Path) -> None:
    site_packages = wheel(tmp_path / "site-packages")
    for _ in range(2):  # a second start finds the links in place
        try:
            install = find_triton_server("", site_packages=site_packages, state_directory=tmp_path / "state")
        except ConfigError as error:
            pytest.skip(str(error))
    assert install.backend_directory is not None
    names = sorted(path.name for path in (install.backend_directory / "python").iterdir())
    assert names == ["libtriton_python.so", "triton_python_backend_stub"]
    assert install.command([])[1:] == [f"--backend-directory={install.backend_directory}"]
    assert install.command(["--backend-directory=/other"])[1:] == ["--backend-directory=/other"]


def test_an_installation_that_cannot_be_written_serves_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    try:
        install = find_triton_server(
            "", site_packages=wheel(tmp_path / "site-packages"), state_directory=tmp_path / "file" / "state"
        )
    except ConfigError as error:
        pytest.skip(str(error))
    assert install.backend_directory is not None
    try:
        assert (install.backend_directory / "python" / "libtriton_python.so").exists()
        assert install.backend_directory.parent.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(install.backend_directory.parent)


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
