"""What an option offers is what the rooms have: a name without its implementation, or the reverse, is found here."""

from __future__ import annotations

import torch

from minisgl_backend import config, number_formats
from minisgl_backend.attention.registry import KINDS
from minisgl_backend.cache.kv_manager import PREFIX_CACHES
from minisgl_backend.scheduler.policy import QUEUES


def test_what_options_offer_is_there() -> None:
    assert {name for kind in KINDS.values() for name in kind.backends} == set(config.BACKENDS)
    assert tuple(PREFIX_CACHES) == config.CACHE_TYPES
    assert tuple(QUEUES) == config.POLICIES


def test_number_formats_are_those_of_torch() -> None:
    for name in (*number_formats.DTYPES, *number_formats.KV_CACHE_DTYPES.values()):
        assert isinstance(getattr(torch, name), torch.dtype)
