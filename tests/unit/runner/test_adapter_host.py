"""Ranks that read an adapter while they serve: all have it or none, and one that still reads holds up nobody."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.runner.adapter_host import AdapterHost
from tests.adapter_folders import factors, save_adapter


class Slots:
    device = torch.device("cpu")
    most_file_bytes = 1 << 20

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.wrong: Exception | None = None

    def ready(self, adapter: Any) -> Any:
        if self.wrong is not None:
            raise self.wrong
        return adapter.digest

    def keep(self, number: int, ready: Any) -> None:
        self.kept[number] = ready

    def drop(self, number: int) -> None:
        self.kept.pop(number, None)


class TwoRanks:
    """The other one's value: `other`, or the same as this one's."""

    def __init__(self) -> None:
        self.other: int | None = None
        self._sign = 1

    def minimum(self, value: int) -> int:
        other, self._sign = value if self.other is None else self._sign * self.other, -self._sign
        return min(value, other)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(save_adapter(tmp_path / "a", factors("model.layers.0.self_attn.q_proj")))


def read(slots: Any, tp: Any, folder: str) -> AdapterHost:
    host = AdapterHost(slots, tp)
    host.begin(7, folder)
    while not host.is_read(7):
        pass
    return host


def test_both_have_it_once_both_have_read_it(folder: str) -> None:
    slots, tp = Slots(), TwoRanks()
    host = read(slots, tp, folder)
    tp.other = -2  # still reads
    for _ in range(2):
        assert host.keep(7) is None
        assert slots.kept == {}
    tp.other = None
    digest = host.keep(7)
    assert slots.kept == {7: digest}
    host.drop(7)
    assert slots.kept == {}


@pytest.mark.parametrize("other", [-1, 12345])
def test_what_another_rank_cannot_read_is_not_kept(folder: str, other: int) -> None:
    slots, tp = Slots(), TwoRanks()
    host = read(slots, tp, folder)
    tp.other = other
    with pytest.raises(ConfigError, match="another rank could not read it, or read another adapter"):
        host.keep(7)
    assert slots.kept == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (ConfigError("of another base"), "of another base"),
        (MemoryError("none"), r"cannot be read \(MemoryError: none\)"),
    ],
)
def test_what_this_rank_cannot_read_is_told(folder: str, wrong: Exception, words: str) -> None:
    slots, tp = Slots(), TwoRanks()
    slots.wrong = wrong
    host = read(slots, tp, folder)
    with pytest.raises(ConfigError, match=words):
        host.keep(7)
    assert slots.kept == {}


def test_what_is_dropped_while_it_is_read_is_not_kept(folder: str) -> None:
    slots = Slots()
    host = read(slots, TwoRanks(), folder)
    host.drop(7)
    host.begin(8, folder)
    while host.keep(8) is None:
        pass
    assert set(slots.kept) == {8}


def test_what_is_dropped_before_its_turn_is_not_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, go, read_ones = Slots(), threading.Event(), []

    def ready(adapter: Any) -> Any:
        assert go.wait(10)
        read_ones.append(adapter)
        return adapter.digest

    monkeypatch.setattr(slots, "ready", ready)
    host = AdapterHost(slots, TwoRanks())  # type: ignore[arg-type]
    for number in (1, 2, 3):
        host.begin(number, folder)
    host.drop(2)
    go.set()
    while host.keep(1) is None or not host.is_read(3):
        pass
    assert len(read_ones) == 2
