"""Writes copies of the model repository with other engine options than its own files have."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.config import OPTIONS, EngineConfig
from minisgl_backend.errors import ConfigError

ENGINE_MODEL = "engine"
INFER_MODEL, INFER_ENGINE = "infer", "engine_infer"
DEMO_MODEL, DEMO_VL_MODEL = "demo", "demo-vl"
CONTROL_MODEL = "control"
_CONTROL_CONFIG = """name: "control"
backend: "python"
max_batch_size: 0
input [
  { name: "command" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "key" data_type: TYPE_STRING dims: [ 1 ] }
]
output [
  { name: "result" data_type: TYPE_STRING dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


def parse_options(given: Mapping[str, str]) -> dict[str, str]:
    """Checks option texts by name and returns them as parameter strings; a model folder becomes an absolute path.

    Raises ConfigError, naming the option, the value and what is allowed.
    """
    values = {name: OPTIONS[name].parse(text) for name, text in given.items()}
    if "model" in values:
        values["model"] = _resolve_model(values["model"])
    config = EngineConfig(**values)
    if values.get("adapters"):  # as the model's, from wherever the server is started
        folders = {name: _adapter(folder) for name, folder in config.adapter_folders.items()}
        values["adapters"] = ",".join(f"{name}={folder}" for name, folder in folders.items())
    if values.get("adapter_dir"):
        values["adapter_dir"] = _absolute(values["adapter_dir"])
    if config.merge_adapter is not None:
        values["merge_adapter"] = _adapter(config.merge_adapter)
    return {name: _parameter_text(value) for name, value in values.items()}


def _adapter(folder: str) -> str:
    from minisgl_backend.models.folder import adapter_path  # as of `_resolve_model`

    return _absolute(adapter_path(folder))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def render_repository(source: Path, target: Path, parameters: Mapping[str, str], *, link_folders: bool = True) -> None:
    """Copies the repository `source` to the existing folder `target`, with `parameters` set in the engine's config.

    Model files and config.pbtxt are copied; other folders (the demo model's weights) are linked, or left out. Raises
    ConfigError if `source` is not a model repository with an engine.
    """
    if not (source / ENGINE_MODEL / "config.pbtxt").is_file():
        raise ConfigError(f"repository is {str(source)!r}; allowed: a folder that holds {ENGINE_MODEL}/config.pbtxt")
    for model in sorted(path for path in source.iterdir() if (path / "config.pbtxt").is_file()):
        _copy_model(model, target / model.name, link_folders)
    config = target / ENGINE_MODEL / "config.pbtxt"
    config.write_text(set_parameters(config.read_text(encoding="utf-8"), parameters), encoding="utf-8")


def add_control_model(repository: Path) -> None:
    """Adds the model `control`, which takes commands of whoever has the admin key. Raises ConfigError if the repository
    has a model of that name already."""
    folder = repository / CONTROL_MODEL
    if folder.exists():
        raise ConfigError(f"the repository has a model {CONTROL_MODEL!r}; allowed with an admin key: none of that name")
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONTROL_CONFIG, encoding="utf-8")
    model = "from minisgl_backend.serving.control_model import TritonPythonModel  # noqa: F401\n"
    (folder / "1" / "model.py").write_text(model, encoding="utf-8")


def add_infer_models(repository: Path) -> None:
    """Adds models to the repository: `infer` is `ensemble`, and `llmapi_infer` is `llmapi`, for whole answers only.
    Triton's plain `infer` can use them, since nothing in them is decoupled. Their engine is another front of the same
    cores.


    Raises ConfigError if the repository has no ensemble.
    """
    ensemble = repository / "ensemble" / "config.pbtxt"
    if not ensemble.is_file():
        raise ConfigError(f"repository is {str(repository)!r}; allowed for {INFER_MODEL!r}: one that holds {ensemble}")
    engine = (repository / ENGINE_MODEL / "config.pbtxt").read_text(encoding="utf-8")
    engine = engine.replace(f'name: "{ENGINE_MODEL}"', f'name: "{INFER_ENGINE}"')
    engine = re.sub(r"^(?:model_transaction_policy|parameters|# every) .*\n", "", engine, flags=re.MULTILINE)
    made = {INFER_ENGINE: engine, INFER_MODEL: _for_whole_answers(ensemble, "ensemble", INFER_MODEL)}
    llmapi = repository / "llmapi" / "config.pbtxt"
    if llmapi.is_file():
        made["llmapi_infer"] = _for_whole_answers(llmapi, "llmapi", "llmapi_infer")
    for name, text in made.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    shutil.copyfile(repository / ENGINE_MODEL / "1" / "model.py", repository / INFER_ENGINE / "1" / "model.py")


def _for_whole_answers(config: Path, name: str, new_name: str) -> str:
    """The config of an ensemble that does not stream."""
    text = config.read_text(encoding="utf-8").replace(f'name: "{name}"', f'name: "{new_name}"')
    text = text.replace(f'model_name: "{ENGINE_MODEL}"', f'model_name: "{INFER_ENGINE}"')
    return re.sub(r'^ *(?:\{ name|input_map \{ key): "stream" .*\n', "", text, flags=re.MULTILINE)


def set_parameters(config: str, parameters: Mapping[str, str]) -> str:
    """The text of a config.pbtxt with these string parameters.

    Entries in the same form are replaced; others stay, and the last of two entries with one key counts.
    """
    if not parameters:
        return config
    before = "|".join(re.escape(_quote(key)) for key in parameters)
    entry = re.compile(
        rf'^parameters {{ key: (?:{before}) value: {{ string_value: "(?:[^"\\]|\\.)*" }} }}\n?', re.MULTILINE
    )
    entries = [
        f"parameters {{ key: {_quote(key)} value: {{ string_value: {_quote(value)} }} }}\n"
        for key, value in parameters.items()
    ]
    return "".join([entry.sub("", config).rstrip("\n"), "\n", *entries])


def _resolve_model(model: str) -> str:
    from minisgl_backend.models.folder import DEMOS, local_path  # `add_infer_models` and others need no model

    if model in DEMOS:
        return model
    folder = local_path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model is {model!r}: that folder has no config.json; allowed: {OPTIONS['model'].allowed}"
            )
        return str(folder.resolve())
    if folder.is_file() and _is_gguf(folder):
        return os.path.abspath(folder)  # a link to a blob without a name is followed when it is read
    is_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.startswith(".")
    if folder.exists() or not is_hub_id:
        raise ConfigError(f"model is {model!r}, which is no folder; allowed: {OPTIONS['model'].allowed}")
    return model


def _copy_model(source: Path, target: Path, link_folders: bool) -> None:
    target.mkdir()
    for entry in sorted(source.iterdir()):
        if entry.name == "__pycache__":
            continue
        if entry.is_file():
            shutil.copyfile(entry, target / entry.name)
        elif entry.name.isdecimal():
            shutil.copytree(entry, target / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif link_folders:
            (target / entry.name).symlink_to(entry.resolve(), target_is_directory=True)


def _parameter_text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _is_gguf(path: Path) -> bool:
    from minisgl_backend.weights.gguf_index import is_gguf  # options are also read before anything is installed

    return is_gguf(path)
