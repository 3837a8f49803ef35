"""An engine core that starts again: it has the room that it had, and starts whatever became of folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.adapters import Source
from minisgl_backend.engine.adapters_before import loaded_before
from minisgl_backend.ipc.adapter_table import AdapterTable, LoadedAdapter
from tests.adapter_folders import factors, save_adapter


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Two versions of an adapter, of ranks 32 and 8."""
    ranks = {"v1": 32, "v2": 8}
    module = "model.layers.0.self_attn.q_proj"
    made = {name: save_adapter(tmp_path / name, factors(module, rank=rank), r=rank) for name, rank in ranks.items()}
    return {name: str(folder) for name, folder in made.items()}


def started(tmp_path: Path, folders: dict[str, str], **options: object) -> EngineConfig:
    return EngineConfig(
        model="x",
        adapters=f"support={folders['v1']}",
        adapter_dir=str(tmp_path),
        **options,  # type: ignore[arg-type]
    )


def digest(folder: str) -> bytes:
    return AdapterTensors.read(Path(folder)).digest


def test_the_first_start_is_as_the_options_say(tmp_path: Path, folders: dict[str, str]) -> None:
    config = started(tmp_path, folders)
    assert loaded_before(config, tmp_path) == (config, {})


@pytest.mark.parametrize("slots", [None, 3])
def test_what_was_loaded_since_has_the_room_of_the_options(
    tmp_path: Path, folders: dict[str, str], slots: int | None
) -> None:
    config, two = started(tmp_path, folders, max_adapters=slots), digest(folders["v2"])
    AdapterTable(tmp_path).write({"support": LoadedAdapter(folders["v2"], two.hex())})
    again, sources = loaded_before(config, tmp_path)
    assert (again.adapters, sources) == ("", {"support": Source(folders["v2"], two)})
    assert (again.adapter_rank, again.num_adapter_slots) == (32, config.num_adapter_slots)
    assert again.most_loaded_adapters == config.most_loaded_adapters


@pytest.mark.parametrize("change", ["gone", "another", "broken", "none"])
def test_a_folder_that_has_changed_ends_no_start(tmp_path: Path, folders: dict[str, str], change: str) -> None:
    config, one = started(tmp_path, folders), digest(folders["v1"])
    AdapterTable(tmp_path).write({"support": LoadedAdapter(folders["v1"], one.hex())})
    if change == "broken":
        (Path(folders["v1"]) / "adapter_model.safetensors").write_bytes(b"half")
    elif change != "none":
        shutil.rmtree(folders["v1"])
    if change == "another":
        shutil.copytree(folders["v2"], folders["v1"])
    again, sources = loaded_before(config, tmp_path)
    if change == "none":
        assert (again.adapter_folders, sources) == (config.adapter_folders, {})
    else:
        assert (again.adapters, sources) == ("", {"support": Source(folders["v1"], one)})


def test_a_server_that_reads_none_while_serving(tmp_path: Path, folders: dict[str, str]) -> None:
    config = EngineConfig(model="x", adapters=f"a={folders['v1']},b={folders['v2']}")
    AdapterTable(tmp_path).write({"b": LoadedAdapter(folders["v2"], "")})
    again, sources = loaded_before(config, tmp_path)
    assert (again.adapters, again.adapter_rank, again.num_adapter_slots, sources) == (f"b={folders['v2']}", 0, 1, {})
