"""Two engine cores on two GPUs: each has one of its own, both give the same answers, and one survives the other.

python -m pytest -q -p no:cacheprovider tests/gpu/test_cores_on_gpus.py
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl_backend.config import EngineConfig
from tests.integration.conftest import START_SECONDS, Front, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

POOL_BYTES = 1 << 28  # far less than the pages of a core, far more than a process that only looks at a GPU


@pytest.fixture
def front() -> Iterator[Front]:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-test-", dir="/tmp"))  # socket paths must be short
    found = Front(EngineConfig(dp=2, memory_ratio=0.1, attention_backend="triton"), directory)
    yield found
    found.client.close()
    shutil.rmtree(directory, ignore_errors=True)


def used_bytes() -> list[int]:
    return [total - free for free, total in (torch.cuda.mem_get_info(index) for index in range(2))]


def test_each_core_has_a_gpu_of_its_own(front: Front) -> None:
    before = used_bytes()
    front.client.start(START_SECONDS)
    taken = [after - used for after, used in zip(used_bytes(), before, strict=True)]
    assert min(taken) > POOL_BYTES, taken
    assert max(taken) < 1.5 * min(taken), "neither core has anything on the other's"
    uids = [front.submit([5, 6, 7, 8], max_tokens=40, temperature=0.0) for _ in range(8)]
    wait_for(lambda: len(front.reasons) == 8)
    assert len({tuple(front.tokens[uid]) for uid in uids}) == 1
    assert [front.stats(core).values["total_finished"] for core in range(2)] == [4, 4]
    pid = front.client.core_pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: front.downs)
    again = front.submit([5, 6, 7, 8], max_tokens=40, temperature=0.0)
    wait_for(lambda: again in front.reasons)
    assert front.tokens[again] == front.tokens[uids[0]]
    wait_for(lambda: None not in front.client.core_pids, START_SECONDS)
