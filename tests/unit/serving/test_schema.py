"""The tracked config.pbtxt files say what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.engine import demo_name, read_engine_config, read_parameters
from minisgl_backend.serving.schema import ENSEMBLES, MODELS, outdated_configs, write_configs
from minisgl_backend.serving.tensors import ENDPOINT_INPUTS, IMAGE_INPUTS, INPUTS, OUTPUTS, TENSORS

REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"


def test_the_files_are_up_to_date() -> None:
    assert outdated_configs(REPOSITORY) == []


def test_inputs_and_outputs_share_no_name() -> None:
    """An ensemble has one name space for both."""
    assert not set(TENSORS) & {tensor.name for tensor in OUTPUTS}
    for ensemble in ENSEMBLES:
        names = [tensor.name for tensor in (*ensemble.inputs, *ensemble.text, *ensemble.details)]
        assert len(set(names)) == len(names)


def test_every_input_of_an_ensemble_reaches_the_tokenizer_under_one_type() -> None:
    for ensemble in ENSEMBLES:
        inputs = {tensor.name: tensor for tensor in ensemble.inputs}
        assert set(ensemble.tokenizer_map.values()) == set(inputs)
        for name, own in ensemble.tokenizer_map.items():
            assert (TENSORS[name].dtype, TENSORS[name].dims) == (inputs[own].dtype, inputs[own].dims)


def test_what_users_edit_is_kept(tmp_path: Path) -> None:
    assert len(write_configs(tmp_path)) == len(MODELS)
    engine = tmp_path / "engine" / "config.pbtxt"
    mine = 'parameters { key: "tp" value: { string_value: "2" } }\n'
    engine.write_text(engine.read_text() + mine)
    assert write_configs(tmp_path) == []
    assert engine.read_text().endswith(mine)
    engine.write_text(engine.read_text().replace("decoupled: true", "decoupled: false"))
    assert outdated_configs(tmp_path) == [engine]


def test_parsed_by_the_real_grammar() -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    for model in MODELS:
        config = text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config.ModelConfig())
        assert config.name == model
        assert config.max_batch_size == (0 if model in ("vllm_model", "llmapi", "embedding") else 1)
        if model == "ensemble":
            assert [tensor.name for tensor in config.input] == [
                tensor.name for tensor in INPUTS + IMAGE_INPUTS + ENDPOINT_INPUTS
            ]


def test_engine_options_are_read_from_the_repository(tmp_path: Path) -> None:
    config = read_engine_config(REPOSITORY)
    assert demo_name(config, REPOSITORY) == "demo"
    assert config == EngineConfig(model=str(REPOSITORY / "engine" / "demo_model"))
    text = """
    # parameters { key: "tp" value: { string_value: "8" } }
    parameters: { key: "page_size" value: { string_value: "16" } }
    parameters [ { key: "dtype", value: { string_value: "float16" } } ]
    """
    assert read_parameters(text) == {"page_size": "16", "dtype": "float16"}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_engine_config(tmp_path)
