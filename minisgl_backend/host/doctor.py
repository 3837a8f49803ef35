"""`minisgl doctor`: what this machine can run, what is missing, and the commands that install it.

Needs only the standard library, so that it can report missing packages. Each fact comes from the module that decides
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import minisgl_backend
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.parser import OptionParser
from minisgl_backend.host.options.server import parse_arguments
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.installation import model_repository
from minisgl_backend.models.folder import DEMO, find_model_dir
from minisgl_backend.process.installed import DISTRIBUTION, Requirement, requirements_of
from minisgl_backend.process.port_owners import server_on
from minisgl_backend.process.ports import free_port_error
from minisgl_backend.process.resources import usable_cores
from minisgl_backend.process.writable import temporary_folders, write_error

OK = "ok"
NOTE = "note"  # a fault or a missing part that the demo does not need
PROBLEM = "problem"  # the demo cannot be served

_SECTIONS = ("machine", "packages", "server", "attention", "ports", "folders", "demo")
_INSTALLED = ("packages", "server")  # what scripts/setup.sh can install
_CPU_TORCH = "https://download.pytorch.org/whl/cpu"
_PROBE = "minisgl_backend.engine.machine_report"
_PROBE_SECONDS = 180.0  # a cold disk reads gigabytes of CUDA libraries
_NVIDIA_SMI_SECONDS = 30.0
# Each of the three Python models takes 1 MiB at start, and more for large requests; Docker's default is 64 MiB.
_LEAST_SHARED_MEMORY = 16 << 20
_SHARED_MEMORY_OF_RANKS = 1 << 30  # NCCL's buffers between processes


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    state: str  # OK, NOTE or PROBLEM
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings about this machine, in the order of the report."""
    gpus = _gpus()
    num_gpus = sum(finding.state == OK and finding.name != "gpu" for finding in gpus)
    command = [sys.executable, "-m", _PROBE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as probe:
        found = [*_machine(), *gpus, *_packages(num_gpus > 0), *_server(), *_ports(), *_folders(num_gpus)]
        found += _engine(_answer(probe), num_gpus > 0)
    return sorted(found, key=lambda finding: _SECTIONS.index(finding.section))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 the demo model could be served, 1 it could not."""
    parser = OptionParser(
        prog="minisgl doctor",
        description="Say what this machine can run, and what is missing.",
        epilog="Exit status 0: the demo model could be served. minisgl check MODEL says what "
        "options come to for a model.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    options = parser.parse_args(arguments)
    findings = examine()
    fit = all(finding.state != PROBLEM for finding in findings)
    if options.json:
        report = {
            "version": minisgl_backend.__version__,
            "can_serve_demo": fit,
            "packages": {requirement.name: requirement.installed for requirement in _all_requirements()},
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(findings)))
    return 0 if fit else 1


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    yield f"{DISTRIBUTION} {minisgl_backend.__version__}"
    marks = {OK: "ok     ", NOTE: "note   ", PROBLEM: "PROBLEM"}
    if sys.stdout.isatty():
        colours = {OK: 32, NOTE: 33, PROBLEM: 31}
        marks = {state: f"\033[{colours[state]}m{mark}\033[0m" for state, mark in marks.items()}
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            yield f"\n{section}"
        yield f"  {marks[finding.state]} {finding.name}: {finding.text}"
        if finding.remedy:
            yield f"          {finding.remedy}"
    problems = sum(finding.state == PROBLEM for finding in findings)
    lacking = any(finding.state == PROBLEM and finding.section in _INSTALLED for finding in findings)
    yield ""
    if problems:
        setup = model_repository().parent / "scripts" / "setup.sh"
        hint = f"; bash {setup} installs what is missing in a checkout" if lacking and setup.is_file() else ""
        yield f"The demo model cannot be served: {problems} {'problem' if problems == 1 else 'problems'}{hint}"
    else:
        yield "The demo model can be served: minisgl serve"


def _machine() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    libc = " ".join(platform.libc_ver()).strip()
    state = OK if system == "Linux" else PROBLEM
    remedy = "" if system == "Linux" else "use Linux, or a container on it"
    yield Finding("machine", "system", state, ", ".join(filter(None, (f"{system} {machine}", libc))), remedy)
    if system == "Linux":
        yield Finding("machine", "processors", OK, f"{usable_cores()} cores")
    yield Finding("machine", "python", OK, f"{platform.python_version()} at {sys.executable}")


def _gpus() -> list[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [Finding("machine", "gpu", OK, "no NVIDIA driver (nvidia-smi): models run on the CPU")]
    query = [program, "--query-gpu=index,name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False)
        lines, failure = done.stdout.splitlines(), (done.stderr or done.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("machine", "gpu", NOTE, f"nvidia-smi does not answer: {error}")]
    if done.returncode != 0 or not lines:
        return [Finding("machine", "gpu", NOTE, f"nvidia-smi fails: {failure or 'no GPU'}")]
    found = []
    for line in lines:
        index, name, driver, memory, capability = [*map(str.strip, line.split(",")), *[""] * 5][:5]
        text = f"{name}, {memory}, compute capability {capability}, driver {driver}"
        found.append(Finding("machine", f"gpu {index}", OK, text))
    return found


def _packages(has_gpu: bool) -> Iterator[Finding]:
    """A finding for the package's own requirements, and one for each extra that serving needs."""
    try:
        yield _group("needed", [*requirements_of(), *requirements_of("engine")], PROBLEM, "", has_gpu)
    except metadata.PackageNotFoundError:
        text = f"{DISTRIBUTION} is not installed for this Python"
        yield Finding(
            "packages", "needed", PROBLEM, text, f"{_pip()} DIST.whl[serve], or bash scripts/setup.sh in a checkout"
        )
        return
    if _server_is_the_wheels():
        engine = {requirement.text for requirement in requirements_of("engine")}
        own = [requirement for requirement in requirements_of("server") if requirement.text not in engine]
        yield _group("server", own, PROBLEM, "or use NVIDIA's container, whose server it takes", has_gpu)
    yield _group("openai", requirements_of("openai"), PROBLEM, "or serve without it: --openai-port 0", has_gpu)
    yield _group("client", requirements_of("client"), NOTE, "for minisgl generate, chat, bench and status", has_gpu)
    yield _group("grammar", requirements_of("grammar"), NOTE, "for JSON schemas and grammars", has_gpu)


def _all_requirements() -> Iterator[Requirement]:
    try:
        for extra in ("", "engine", "server", "openai", "client", "grammar", "cuda", "cuda12", "trtllm"):
            yield from requirements_of(extra)
    except metadata.PackageNotFoundError:
        return


def _group(name: str, requirements: Sequence[Requirement], state: str, purpose: str, has_gpu: bool) -> Finding:
    said, missing = [], []
    for requirement in requirements:
        asked = f", but {requirement.specifier} is needed" if requirement.specifier else ""
        if requirement.installed is None:
            said.append(f"{requirement.name} is missing")
        elif not requirement.fits:
            said.append(f"{requirement.name} is {requirement.installed}{asked}")
        else:
            continue
        missing.append(requirement)
    if not missing:
        return Finding("packages", name, OK, ", ".join(f"{one.name} {one.installed}" for one in requirements))
    remedy = f"{_pip()} {shlex.join(one.text for one in missing)}"
    if not has_gpu and any(one.name == "torch" for one in missing):
        remedy = f"{_pip()} torch --index-url {_CPU_TORCH} && {remedy}"
    return Finding("packages", name, state, "; ".join(said), f"{remedy}{f' ({purpose})' if purpose else ''}")


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install"


def _server_is_the_wheels() -> bool:
    """Whether no other server is on PATH."""
    try:
        return find_triton_server().backend_directory is not None
    except ConfigError:
        return True


def _server() -> Iterator[Finding]:
    try:
        install = find_triton_server()
    except ConfigError as error:
        yield Finding("server", "tritonserver", PROBLEM, str(error))
    else:
        version = install.version
        where = "the wheel nvidia-pytriton" if install.backend_directory is not None else "PATH"
        if version is None:
            yield Finding("server", "tritonserver", PROBLEM, f"{install.binary} does not start", str(install.binary))
        else:
            yield Finding("server", "tritonserver", OK, f"{version} from {where}: {install.binary}")


def _ports() -> Iterator[Finding]:
    arguments = parse_arguments([])
    host = arguments.server.host
    for option, port in arguments.ports:
        problem = free_port_error(host, [(option, port)])
        name = option.removeprefix("--").removesuffix("-port")
        if problem is None:
            yield Finding("ports", name, OK, f"{port} is free on {host}")
        elif (owner := server_on(port)) is not None:
            text = f"{port} is in use by a minisgl server (process {owner})"
            yield Finding("ports", name, NOTE, text, f"another beside it: minisgl serve {option} ANOTHER")
        else:
            yield Finding("ports", name, PROBLEM, problem, f"minisgl serve {option} ANOTHER")


def _folders(num_gpus: int) -> Iterator[Finding]:
    yield _shared_memory(num_gpus)
    for folder in temporary_folders():
        state, text = (PROBLEM, folder.fault) if folder.fault else (OK, "is writable")
        yield Finding("folders", folder.name, state, f"{folder.path} {text}".strip(), folder.remedy)
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    yield _writable("models from the hub", hub, NOTE, "HF_HOME")
    if num_gpus:
        kernels = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton")
        yield _writable("compiled kernels", kernels, PROBLEM, "TRITON_CACHE_DIR")


def _shared_memory(num_gpus: int) -> Finding:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("folders", "/dev/shm", PROBLEM, f"cannot be used: {error.strerror}", "mount a tmpfs there")
    free = found.f_bavail * found.f_frsize
    text, remedy = f"{_size(free)} free", "in Docker: --shm-size 1g"
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        return Finding("folders", "/dev/shm", PROBLEM, "is not writable, and Triton's Python backend needs it")
    if free < _LEAST_SHARED_MEMORY:
        least = _size(_LEAST_SHARED_MEMORY)
        return Finding("folders", "/dev/shm", PROBLEM, f"{text}; Triton's Python backend needs {least}", remedy)
    if num_gpus > 1 and free < _SHARED_MEMORY_OF_RANKS:
        return Finding("folders", "/dev/shm", NOTE, f"{text}, which is little for several GPUs (--tp)", remedy)
    return Finding("folders", "/dev/shm", OK, text)


def _writable(name: str, folder: Path, state: str, variable: str) -> Finding:
    """Whether a folder is writable, or can be created if missing."""
    error = write_error(folder)
    if error is None:
        return Finding("folders", name, OK, f"{folder} is writable")
    text = f"{folder} cannot be written: {error.strerror}"
    return Finding("folders", name, state, text, f"{variable}=FOLDER chooses another")


def _answer(probe: subprocess.Popen[str]) -> Mapping[str, Any]:
    """The engine's report about the machine; `broken` if there is none."""
    try:
        output, errors = probe.communicate(timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()
        return {"broken": f"torch did not load within {_PROBE_SECONDS:g} s"}
    # Libraries may print, before and after the report.
    for line in reversed(output.splitlines() if probe.returncode == 0 else []):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    told = [line for line in errors.splitlines() if line.strip()]
    return {"broken": told[-1] if told else f"the process ended with exit code {probe.returncode}"}


def _engine(answer: Mapping[str, Any], has_gpu: bool) -> Iterator[Finding]:
    yield from _idle_cpus(answer.get("idle_cpus"))
    if "broken" in answer:
        yield Finding("packages", "torch", PROBLEM, f"cannot be used: {answer['broken']}")
        return
    torch, device = answer["torch"], answer["device"]
    built = f"{torch['version']}, for CUDA {torch['cuda']}" if torch["cuda"] else f"{torch['version']}, for the CPU"
    runs = f"models run on {device['name']}" + (f" ({device['count']} GPUs)" if device["count"] > 1 else "")
    text = f"{built}; {runs}, {_size(answer['free_bytes'])} of memory free"
    if has_gpu and device["kind"] == "cpu":
        remedy = f"{_pip()} --force-reinstall torch, a build for the driver's CUDA"
        if torch["cuda"]:
            remedy = f"CUDA_VISIBLE_DEVICES hides it, or its driver is too old for CUDA {torch['cuda']}"
        yield Finding("packages", "torch", NOTE, f"{text}: it sees no GPU", remedy)
    else:
        yield Finding("packages", "torch", OK, text)
    if not torch["bytecode"]:
        text = "torch's cannot be kept (PYTHONDONTWRITEBYTECODE, or a folder of others): each process compiles it anew"
        remedy = shlex.join([sys.executable, "-m", "compileall", "-q", torch["folder"]])
        yield Finding("packages", "bytecode", NOTE, text, remedy)
    if device["kind"] == "cuda":
        yield from _kernels(torch["cuda"])
    else:
        yield _cpu_kernels(answer["cpu_kernels"])
    try:
        find_model_dir(DEMO)
    except ConfigError as error:
        yield Finding("demo", "files", PROBLEM, str(error))
        return
    if "refusal" in answer:
        yield Finding("demo", "options", PROBLEM, answer["refusal"])
        return
    demo, attention = answer["demo"], answer["attention"]
    text = f"{demo['dtype']}, attention {demo['attention']}, pages of {demo['page_size']} tokens"
    yield Finding("demo", "options", OK, text)
    yield from _backends(attention)


def _kernels(cuda: str) -> Iterator[Finding]:
    """The extra with kernels for torch's CUDA version: from 13 on they have another name."""
    extra = "cuda" if int(cuda.split(".")[0]) >= 13 else "cuda12"
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield _group(extra, requirements_of(extra), NOTE, "for the fastest attention", True)


def _cpu_kernels(refusal: str) -> Finding:
    name = "CPU kernels"
    if not refusal:
        return Finding("packages", name, OK, "compiled: models saved in bfloat16 stay so")
    text = f"none, so that models are computed in float32: {refusal}"
    if "processor" in refusal:
        return Finding("packages", name, OK, text)
    return Finding("packages", name, NOTE, text, "install g++ 11 or later, or CXX=COMMAND chooses another compiler")


def _backends(attention: Mapping[str, Any]) -> Iterator[Finding]:
    chosen = tuple(dict.fromkeys((attention["prefill"], attention["decode"])))
    order = ", then ".join(attention["tried"])
    text = f"{','.join(chosen)} for models with heads of {attention['head_dim']}; on this device it tries {order}"
    yield Finding("attention", "auto", NOTE if attention["warnings"] else OK, text, "; ".join(attention["warnings"]))
    for name, refusal in attention["backends"].items():
        if name in chosen:
            parts = [part for part in ("prefill", "decode") if attention[part] == name]
            yield Finding("attention", name, OK, f"auto takes it for {' and '.join(parts)}")
        elif refusal is None:
            yield Finding("attention", name, OK, f"works with --attn {name}; auto prefers {','.join(chosen)}")
        else:
            yield Finding("attention", name, OK, f"not here: {refusal}")


def _idle_cpus(idle: Mapping[str, Any] | None) -> Iterator[Finding]:
    if idle is None:
        return
    name, asks = "idle processors", idle["asks"]
    if idle["allowed"]:
        text = "may be kept awake while sequences run" + ("" if asks else "; auto lets them sleep here")
        yield Finding("machine", name, OK, text)
    else:
        remedy = "run as root; in a container with --device /dev/cpu_dma_latency" if asks else ""
        text = "may not be kept awake while sequences run (idle_cpus)"
        yield Finding("machine", name, NOTE if asks else OK, text, remedy)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


if __name__ == "__main__":
    sys.exit(main())
