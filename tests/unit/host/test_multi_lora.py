"""vllm_backend's multi_lora.json beside model.json: adapters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.engine import read_engine_config


def repository(folder: Path, text: str, adapters: str = "") -> Path:
    (folder / "vllm_model" / "1").mkdir(parents=True)
    (folder / "vllm_model" / "1" / "multi_lora.json").write_text(text)
    (folder / "engine").mkdir()
    (folder / "engine" / "config.pbtxt").write_text(
        f'parameters {{ key: "adapters" value: {{ string_value: "{adapters}" }} }}' if adapters else ""
    )
    return folder


def test_it_names_the_adapters(tmp_path: Path) -> None:
    config = read_engine_config(repository(tmp_path, '{"sql": "/a/sql", "chat": "chat"}'))
    assert config.adapter_folders == {"sql": "/a/sql", "chat": str(tmp_path / "vllm_model" / "1" / "chat")}


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"a": 1}', "{", '{"a,b": "/x"}', '{"a=b": "/x"}', '{"": "/x"}', "3", '"x"']
)
def test_what_names_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"multi_lora\.json"):
        read_engine_config(repository(tmp_path, text))


def test_it_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapters is 'a=/a'; allowed beside .*multi_lora.json: unset"):
        read_engine_config(repository(tmp_path, '{"sql": "/a/sql"}', "a=/a"))
