"""A warm-up pass runs few layers, and launches every kernel of a whole forward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked
from minisgl_backend.layers import context
from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models import build
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import warm_up_layers
from tests.parity.checkpoints import save_checkpoint
from tests.parity.paged import PagedModel

Launch = tuple[object, ...]


class Recorder:
    """Other operations or kernels, with a note of what tells one call's kernels from another's."""

    def __init__(self, ops: Any, launches: set[Launch]) -> None:
        self._ops, self._launches = ops, launches

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ops, name)
        if not callable(method):
            return method

        def recorded(*args: Any, **kwargs: Any) -> Any:
            kinds = [_kind(argument) for argument in args]
            kinds += [(key, _kind(kwargs[key])) for key in sorted(kwargs)]
            self._launches.add((name, *kinds))
            return method(*args, **kwargs)

        return recorded


def _kind(argument: Any) -> object:
    if isinstance(argument, (GemmCall, MixtureCall, Picked)):
        return tuple(map(_kind, argument))
    if isinstance(argument, Experts):
        return tuple(_kind(getattr(argument, each.name)) for each in dataclasses.fields(argument))
    return (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else type(argument)


SIX_LAYERS: dict[str, dict[str, Any]] = {  # what tells layers apart
    "llama": {},
    "mistral-window": {},
    "qwen2-windows-above": {"max_window_layers": 3},
    "qwen3-windows-between": {"layer_types": [*["full_attention"] * 3, "sliding_attention", *["full_attention"] * 2]},
    "qwen3_moe": {},
    "qwen3_moe-window": {},
    "qwen3_moe-sharded-mixed": {"mlp_only_layers": [2, 3]},
}


@pytest.mark.parametrize("name", SIX_LAYERS)
@pytest.mark.parametrize("last_only", [False, True])
def test_every_kernel_is_warmed_up(name: str, last_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(name, tmp_path, num_hidden_layers=6, **SIX_LAYERS[name])
    launches: set[Launch] = set()
    layers: set[int] = set()
    select, select_kernels = build.select_ops, build.select_kernels
    attend, step = AttentionPair.attend, context.ForwardContext

    def recorded(*args: Any) -> Any:
        kernels: Any = select_kernels(*args)
        kernels.plain, kernels.mixtures = Recorder(kernels.plain, launches), Recorder(kernels.mixtures, launches)
        return kernels

    def attending(self: AttentionPair, layer: AttentionLayer, *args: Any) -> torch.Tensor:
        launches.add(("attend", layer.window))
        layers.add(layer.index)
        return attend(self, layer, *args)

    monkeypatch.setattr(build, "select_ops", lambda *args, **kwargs: Recorder(select(*args, **kwargs), launches))
    monkeypatch.setattr(build, "select_kernels", recorded)
    monkeypatch.setattr(AttentionPair, "attend", attending)

    def launched(is_warm_up: bool) -> set[Launch]:
        monkeypatch.setattr("tests.parity.paged.ForwardContext", lambda **fields: step(**fields, is_warm_up=is_warm_up))
        paged = PagedModel(tmp_path, page_size=16)
        launches.clear()
        layers.clear()
        paged.step({1: [3, 4, 5], 2: [6]}, {}, last_only=last_only)
        paged.step({2: [7, 8, 9]}, {1: 7}, last_only=last_only)
        return set(launches)

    warmed_up = launched(is_warm_up=True)
    assert len(layers) < 6
    assert warmed_up == launched(is_warm_up=False)
    assert len(layers) == 6


def test_few_layers_are_warmed_up(tmp_path: Path) -> None:
    """Three of 28 equal layers: the first, which has none before it, the next, and the last."""
    save_checkpoint("qwen3-windows-between", tmp_path)
    config = ModelConfig.load(tmp_path)
    sliding, full = config.layers[:2]

    def layers(*kinds: LayerConfig) -> tuple[int, ...]:
        return warm_up_layers(dataclasses.replace(config, layers=kinds))

    assert layers(*[full] * 28) == (0, 1, 27)
    assert layers(full) == (0,)
    assert layers(full, full) == (0, 1)
    assert layers(*[sliding] * 5, full, *[sliding] * 5, full) == (0, 1, 5, 11)
    assert layers(full, *[sliding] * 5) == (0, 1, 5)
