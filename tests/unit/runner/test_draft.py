"""A model that is to propose: which are refused, and what the target's pages keep for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.groups import CacheGroup
from minisgl_backend.kv.kinds import Sliding
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.draft import draft_spec, keeping_for
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.speculation.proposer import DeviceProposals, create_proposer
from minisgl_backend.speculative_config import METHODS, Method, read_speculative_config
from tests.parity.checkpoints import CHECKPOINTS

DEMO = find_model_dir("demo")
CPU = MachineFacts(kind="cpu", name="CPU", capability=None, count=1, multiprocessors=0, bfloat16=lambda: False)
ENVIRONMENT = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None)


def resolved(folder: Path, **options: Any) -> RuntimeConfig:
    method = {"method": "draft_model", "model": str(folder)}
    config = EngineConfig(speculative_config=method, **options)  # type: ignore[arg-type]
    return resolve(config, DEMO, ModelConfig.load(DEMO), CPU, ENVIRONMENT, why_missing=lambda package: None)


def model(folder: Path, **changes: Any) -> Path:
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "row"), METHODS.items())
def test_a_row_names_what_serves_it(name: str, row: Method) -> None:
    given = {"method": row.aliases[-1] if row.aliases else name} | ({"model": "x"} if row.takes_model else {})
    config = read_speculative_config(given)
    assert (config.method, config.row) == (name, row)
    on_host, found = create_proposer(config), load_attribute(row.proposer)
    assert (
        isinstance(on_host, DeviceProposals)
        == row.on_device
        == (isinstance(found, type) and issubclass(found, DeviceProposer))
    )
    assert not row.on_device or on_host.catches_up == row.catches_up  # type: ignore[union-attr]


def test_it_shares_what_the_target_has(tmp_path: Path) -> None:
    runtime = resolved(model(tmp_path, num_hidden_layers=2, max_position_embeddings=512), page_size=32)
    assert runtime.draft is not None
    assert (runtime.draft.model.num_layers, runtime.draft.max_seq_len, runtime.max_seq_len) == (2, 512, 4096)
    assert (runtime.draft.prefill_backend, runtime.draft.decode_backend) == ("torch", "torch")


def test_nodes_may_have_it_elsewhere(tmp_path: Path) -> None:
    here = resolved(model(tmp_path)).shared()
    (tmp_path / "elsewhere").mkdir()
    assert here == resolved(model(tmp_path / "elsewhere")).shared()


def test_another_vocabulary_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a vocabulary of 1025 tokens and the target one of 1024; allowed"):
        resolved(model(tmp_path, vocab_size=1025))


def test_another_tokenizer_is_refused_by_a_token(tmp_path: Path) -> None:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = sorted(vocabulary)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"another tokenizer than the target: .* is token \d+ of it and \d+ of"):
        resolved(model(tmp_path))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_one_with_states_is_refused_by_what_it_keeps(name: str, tmp_path: Path) -> None:
    config = CHECKPOINTS[name](vocab_size=1024).config_json
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = rf"some layers of {config['architectures'][0]} .* keep a state .*; allowed: a model whose layers all attend"
    with pytest.raises(ConfigError, match=f"speculative_config's model .* cannot propose: {said}"):
        resolved(tmp_path)


def test_what_cannot_be_loaded_or_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config's model .* cannot propose: .* there is no such folder"):
        resolved(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot propose: tp is 2; allowed: .* num_attention_heads"):
        resolved(model(tmp_path, num_attention_heads=3, num_key_value_heads=3, head_dim=64), tp=2)


def test_pages_keep_what_both_need(tmp_path: Path) -> None:
    runtime = resolved(model(tmp_path))
    assert runtime.draft is not None
    spec = draft_spec(runtime, runtime.draft, torch.device("cpu"))
    windowed = dataclasses.replace(spec, cache_groups=(CacheGroup(Sliding(64)),))
    assert keeping_for(windowed, windowed).cache_groups == (CacheGroup(Sliding(64)),)
    assert keeping_for(windowed, spec).cache_groups == keeping_for(spec, windowed).cache_groups == (CacheGroup(),)
