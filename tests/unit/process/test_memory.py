"""Free memory within control groups, and how processes end in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.process.memory import free_host_bytes, in_words
from minisgl_backend.process.spawn import describe_end

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {24 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 24),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": str(2 * GIB)}, 24),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": str(5 * GIB), f"{V2}/memory.current": str(2 * GIB)}, 3),
        # What only keeps files is given back.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/memory.max": str(5 * GIB),
                f"{V2}/a/memory.current": str(3 * GIB),
                f"{V2}/a/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}",
                f"{V2}/a/b/memory.max": "max",
            },
            4,
        ),
        # In a container the path is the host's.
        ({"proc/self/cgroup": "0::/kubepods/x", f"{V2}/memory.max": str(4 * GIB)}, 4),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/\n0::/",
                f"{V1}/memory.limit_in_bytes": str((1 << 63) - 4096),
                f"{V1}/job/memory.limit_in_bytes": str(3 * GIB),
                f"{V1}/job/memory.usage_in_bytes": str(2 * GIB),
                f"{V1}/job/memory.stat": f"total_inactive_file {GIB}",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "1000", f"{V2}/memory.current": "2000"}, 0),
    ],
)
def test_free_memory_is_that_of_the_narrowest_limit(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_host_bytes(write(tmp_path, files)) == free * GIB


def test_words() -> None:
    assert [in_words(size) for size in (7 * GIB + GIB // 2, 8 << 20)] == ["7.5 GiB", "8 MiB"]
    assert describe_end(-9) == "signal 9: it was killed, most likely for want of memory"
    assert [describe_end(status) for status in (-6, 1)] == ["signal 6", "exit status 1"]
