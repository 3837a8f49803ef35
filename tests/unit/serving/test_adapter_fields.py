"""Which adapter a request names, by the names of each API; and what clients bring along, which is bounded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.adapters.task_modules import most_task_bytes
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.serving.adapter_fields import AdapterFields, AdapterTasks

DEMO = Path(__file__).resolve().parents[3] / "model_repository" / "engine" / "demo_model"
WEIGHTS, CONFIG = np.ones((1, 6), np.float16), np.array([[1, 0, 2]], np.int32)


@pytest.fixture
def tasks(tmp_path: Path) -> AdapterTasks:
    return AdapterTasks(tmp_path / "tasks", 2, most_bytes=128)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, None),
        ({"lora_name": ""}, None),
        ({"lora_name": "sql"}, "sql"),
        ({"lora_name": "sql", "lora_id": 3, "lora_path": "/a/sql", "lora_ckpt_source": "hf"}, "sql"),
        ({"lora_path": "/a/x/../sql/"}, "sql"),
        ({"lora_task_id": 0, "lora_weights": np.zeros((0, 0))}, None),
        ({"lora_id": 3}, "lora_id stands alone"),
        ({"lora_path": "/etc"}, "lora_path is '/etc'; allowed: the folder of an adapter that is served"),
        ({"lora_name": "chat", "lora_path": "/a/sql"}, "allowed: the folder of an adapter that is served, of adapter"),
        ({"lora_name": "sql", "lora_ckpt_source": "nemo"}, "lora_ckpt_source is 'nemo'; allowed: hf"),
        ({"lora_task_id": 3, "lora_name": "sql"}, "both given"),
        ({"lora_weights": WEIGHTS, "lora_config": CONFIG}, "lora_task_id is unset with lora_weights or lora_config"),
        ({"lora_config": CONFIG}, "lora_task_id is unset with lora_weights or lora_config; allowed: 1 or more"),
        ({"lora_task_id": 0, "lora_config": CONFIG}, "lora_task_id is 0 with lora_weights or lora_config"),
        (
            {"lora_task_id": 0, "lora_weights": WEIGHTS, "lora_config": CONFIG},
            "lora_task_id is 0 .* allowed: 1 or more",
        ),
        ({"lora_task_id": 3}, "lora_task_id is not served: name an adapter"),
    ],
    ids=str,
)
def test_which_adapter(fields: dict[str, Any], name: str | None) -> None:
    served: Any = SimpleNamespace(folders=lambda: {"sql": "/a/sql", "chat": "/a/chat"})
    found = AdapterFields(served)
    if name in (None, "sql"):
        assert found.name_of(fields) == name
    else:
        with pytest.raises(InvalidRequestError, match=name):
            found.name_of(fields)


def test_what_a_request_brings_along_is_kept_while_it_is_asked_for(tasks: AdapterTasks, tmp_path: Path) -> None:
    fields = AdapterFields(None, tasks)
    sent = {"lora_task_id": 1, "lora_weights": WEIGHTS, "lora_config": CONFIG}
    first = fields.name_of(sent)
    assert first is not None
    assert first.startswith("task-")
    assert fields.name_of(sent) == fields.name_of({"lora_task_id": 1}) == first
    assert fields.name_of({**sent, "lora_task_id": 2}) == first, "by what it is"
    with pytest.raises(InvalidRequestError, match="lora_task_id is 1, which has other weights"):
        fields.name_of({**sent, "lora_weights": WEIGHTS * 2})
    os.utime(tmp_path / "tasks" / "ids" / "1", (1, 1))
    third = fields.name_of({**sent, "lora_task_id": 3, "lora_weights": WEIGHTS * 3})
    with pytest.raises(InvalidRequestError, match="lora_task_id is 1, which is not kept"):
        fields.name_of({"lora_task_id": 1})
    os.utime(tmp_path / "tasks" / "ids" / "2", (1, 1))
    fourth = fields.name_of({**sent, "lora_task_id": 1, "lora_weights": WEIGHTS * 4})
    folders = {path.name for path in (tmp_path / "tasks").glob("task-*")}
    assert folders == {third, fourth}
    assert not list((tmp_path / "tasks").glob("new-*"))


@pytest.mark.parametrize(
    ("weights", "config", "words"),
    [
        (WEIGHTS, None, "belong together"),
        (WEIGHTS, CONFIG[:, :2], "lora_config has shape"),
        (np.ones((2, 6), np.float16), CONFIG, "lora_config has shape"),
        (WEIGHTS, np.array([[16, 0, 2]], np.int32), "module 16, layer 0, rank 2; allowed: modules 0, 1, 2"),
        (WEIGHTS, np.array([[1, -1, 2]], np.int32), "layer -1"),
        (WEIGHTS, np.array([[1, 0, 513]], np.int32), "rank 513"),
        (WEIGHTS, np.array([[1, 0, 0]], np.int32), "rank 0"),
        (np.ones((1, 65), np.float16), CONFIG, "lora_weights has 130 bytes in 1 rows; allowed: up to 128 bytes, as of"),
        (np.ones((9000, 1), np.float16), np.tile(CONFIG, (9000, 1)), "in 9000 rows; allowed: .* up to 8192 rows"),
    ],
)
def test_tensors_that_are_no_adapter(tasks: AdapterTasks, weights: Any, config: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        tasks.name_of(1, weights, config)


def test_tensors_may_be_as_large_as_all_modules_are() -> None:
    model = ModelConfig.load(DEMO)
    size, widest = model.hidden_size, max(layer.mlp.intermediate_size for layer in model.layers)
    right = 2 * 7 * model.num_layers * 16 * (size + widest)
    assert right <= most_task_bytes(model, 16) < 3 * right
    assert most_task_bytes(model, 512 << 20) == 1 << 30


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="lora_weights cannot be kept"):
        AdapterTasks(tmp_path / "file", 2, 128).name_of(1, WEIGHTS, CONFIG)
