"""Prompt lookup on a real model that writes freely, where little of what is proposed is right: never slower. By the
processor's time of one thread, which other work on the machine changes little."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.speculation import conversations, measure
from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from tests.real.models import smollm2

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

LEAST, TURNS, TOKENS = 0.97, 5, 128
SHARED: dict[str, Any] = {
    "environment": Environment(overlap=None, log_level="WARNING", flashinfer_tensor_cores=None),
    "max_running_requests": 4,
    "num_pages": 64,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_free_writing_is_never_slower(one_thread: None) -> None:
    model = str(smollm2())
    with LLM(model, **SHARED) as plain, LLM(model, speculative_config={"method": "ngram"}, **SHARED) as drafting:
        measure(plain, drafting, conversations("repeating", 1), 16)  # what is slow the first time
        for number, prompt in enumerate(conversations("free", 24)):
            ratios: list[float] = []
            while len(ratios) < TURNS and (not ratios or statistics.median(ratios) < LEAST):
                found = measure(plain, drafting, [prompt], TOKENS)
                assert found["same_texts"] == 1
                ratios.append(found["processor_speedup"])
            print(number, ratios)
            assert statistics.median(ratios) >= LEAST, (number, ratios)
