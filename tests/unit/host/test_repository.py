"""Rendering a private copy of the model repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.engine import read_parameters
from minisgl_backend.host.repository import add_infer_models, parse_options, render_repository, set_parameters
from minisgl_backend.installation import model_repository

CONFIG = """name: "engine"
# parameters { key: "page_size" value: { string_value: "commented" } }
parameters { key: "model" value: { string_value: "demo" } }
parameters: {
  key: "page_size",
  value: { string_value: "1" }
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    repository = tmp_path / "source"
    for model in ("tokenizer", "engine"):
        (repository / model / "1" / "__pycache__").mkdir(parents=True)
        (repository / model / "1" / "model.py").write_text("# code\n")
        (repository / model / "config.pbtxt").write_text(CONFIG.replace("engine", model))
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text('name: "ensemble"\n')
    (repository / "engine" / "demo_model").mkdir()
    (repository / "engine" / "demo_model" / "config.json").write_text("{}")
    return repository


def parameters_of(config: str) -> dict[str, str]:
    """As protobuf reads them, and so the server; the models' own reading must come to the same."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    message = text_format.Parse(config, model_config_pb2.ModelConfig())
    parameters = {key: value.string_value for key, value in message.parameters.items()}
    assert read_parameters(config) == parameters
    return parameters


def test_folders_are_those_of_the_one_who_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    found = parse_options({"adapters": "a=./one, b=~/two,c=/three"})
    assert found["adapters"] == f"a={tmp_path}/one,b=/home/ada/two,c=/three"


def test_of_two_entries_the_last_one_counts() -> None:
    config = set_parameters(CONFIG, {"page_size": "16", "attention_backend": "fa,fi"})
    assert parameters_of(config) == {"model": "demo", "page_size": "16", "attention_backend": "fa,fi"}
    assert '"commented"' in config


def test_an_entry_of_its_own_form_is_replaced() -> None:
    config = set_parameters(set_parameters(CONFIG, {"model": 'a "b"', "tp": "1"}), {"model": "c"})
    assert parameters_of(config) == {"model": "c", "page_size": "1", "tp": "1"}
    assert config.count('"model"') == 1


def test_list_spelling_and_single_line() -> None:
    config = (
        'name: "e" parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "2" } } ]'
    )
    assert parameters_of(set_parameters(config, {"b": "9", "c": "3"})) == {"a": "1", "b": "9", "c": "3"}


@pytest.mark.parametrize("value", ['with "quotes"', "back\\slash", "söme/päth with spaces", "line\nbreak", ""])
def test_any_text_survives(value: str) -> None:
    assert parameters_of(set_parameters(CONFIG, {"model": value, "dtype": value}))["model"] == value
    assert parameters_of(set_parameters(CONFIG, {"dtype": value}))["dtype"] == value


def test_nothing_to_set_changes_nothing() -> None:
    assert set_parameters(CONFIG, {}) == CONFIG


def test_render_copies_models_and_leaves_the_source_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    render_repository(source, target, {"page_size": "16"})
    assert sorted(path.name for path in target.iterdir()) == ["engine", "ensemble", "tokenizer"]
    assert parameters_of((target / "engine" / "config.pbtxt").read_text())["page_size"] == "16"
    assert parameters_of((target / "tokenizer" / "config.pbtxt").read_text())["page_size"] == "1"
    assert parameters_of((source / "engine" / "config.pbtxt").read_text())["page_size"] == "1"
    assert (target / "engine" / "1" / "model.py").read_text() == "# code\n"
    assert not (target / "engine" / "1" / "__pycache__").exists()
    assert (target / "ensemble" / "1").is_dir()
    assert (target / "engine" / "demo_model" / "config.json").read_text() == "{}"


def test_a_model_for_plain_infer(tmp_path: Path) -> None:
    """Of the same parts, but for a front that is not decoupled."""
    render_repository(model_repository(), tmp_path, {"tp": "2"}, link_folders=False)
    add_infer_models(tmp_path)
    engine, whole, ensemble = (
        (tmp_path / name / "config.pbtxt").read_text(encoding="utf-8") for name in ("engine_infer", "infer", "ensemble")
    )
    assert 'name: "engine_infer"' in engine
    assert "decoupled" not in engine
    assert "parameters" not in engine
    assert (tmp_path / "engine_infer" / "1" / "model.py").is_file()
    assert (tmp_path / "infer" / "1").is_dir()
    assert whole.count('"engine_infer"') == 1
    assert '"engine"' not in whole
    assert len(ensemble.splitlines()) == len(whole.splitlines()) + 2, "stream is no input of it"


def test_render_refuses_what_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine/config\.pbtxt"):
        render_repository(tmp_path, tmp_path / "copy", {})


def test_options_become_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    parsed = parse_options({"model": "my-model", "page_size": "16", "dummy_weights": "ON", "num_pages": "auto"})
    assert parsed == {
        "model": str(tmp_path / "my-model"),
        "page_size": "16",
        "dummy_weights": "true",
        "num_pages": "",
    }


@pytest.mark.parametrize("model", ["demo", "demo-vl", "Qwen/Qwen3-0.6B", "gpt2"])
def test_names_of_models_stay(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_options({"model": model}) == {"model": model}


@pytest.mark.parametrize(
    ("name", "value"), [("page_size", "3"), ("dtype", "int3"), ("model", "./missing"), ("model", "/no/such/folder")]
)
def test_wrong_values_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        parse_options({name: value})
    assert value in str(error.value)
    assert "allowed" in str(error.value)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"that folder has no config\.json; allowed: a folder, a \.gguf file, a hub id, `demo` or"
    ):
        parse_options({"model": str(tmp_path)})
