"""A batch whose engine is killed, then its server, then everything: each line stands once in the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

from benchmarks.served import Served, free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from tests.e2e.test_openai_batches import begin, line, records

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

LINES = 300


def test_each_line_of_a_batch_stands_once_whatever_is_killed_meanwhile(tmp_path: Path) -> None:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    port = free_ports(1)[0]
    asked = [
        line(str(n), messages=[{"role": "user", "content": f"{n}"}], max_tokens=15, ignore_eos=True)
        for n in range(LINES)
    ]
    options = ["--runner", "null", "--null-runner-rate", "200", "--served-model-name", "demo"]
    options += ["--openai-port", str(port), "--files-dir", str(tmp_path / "files"), "--max-batch-requests", "4"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=60.0)

    def counted(batch_id: str) -> int:
        counts = client.batches.retrieve(batch_id).request_counts
        return int(counts.completed + counts.failed)

    with Served(*options, log=tmp_path / "log1") as one:
        batch = begin(client, [*asked, line("wrong", messages=[])])
        one.wait(lambda: counted(batch.id) >= 20)
        os.kill(one.core(), signal.SIGKILL)
        one.wait(lambda: counted(batch.id) >= 60)
        for process in one.pids("bin/tritonserver"):
            os.kill(process, signal.SIGKILL)
        one.wait(lambda: counted(batch.id) >= 120)
        everything = [one.process.pid, *one.pids()]
        for process in everything:
            os.kill(process, signal.SIGKILL)
    with Served(*options, log=tmp_path / "log2") as two:
        two.wait(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        done, failed = records(client, ended.output_file_id), records(client, ended.error_file_id)
    assert not set(done) & set(failed)
    assert {*done, *failed} == {"wrong", *(str(n) for n in range(LINES))}
    assert set(failed) == {"wrong"}, failed
