"""How much host memory this process may still allocate: limited by the machine, its control groups and its own
limit."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that is unused or only caches files, within all limits that apply to this process.

    `root`: where /proc and /sys are, for tests.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for group in _memory_groups(root):
        free = min(free, *_free_in(group))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


def in_words(size: int) -> str:
    """Formats a size for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def _memory_groups(root: Path) -> Iterator[Path]:
    """The folders of the process's control groups (versions 2 and 1) and of their ancestors."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = base / path.strip("/")
        # In a container the path may be the host's, and only the outermost folder may exist.
        yield from {inner: None, **{outer: None for outer in inner.parents if outer.is_relative_to(base)}, base: None}


def _free_in(group: Path) -> Iterator[int]:
    for limit_file, used_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit = _number(group / limit_file)
        if limit is not None:
            used = _number(group / used_file) or 0
            cache = _cached(group / "memory.stat", prefix)
            yield max(0, limit - max(0, used - cache))
    yield 1 << 62


def _cached(stat: Path, prefix: str) -> int:
    """Bytes that the kernel reclaims when memory is needed."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    found = (line.split() for line in _lines(stat))
    return sum(int(words[1]) for words in found if len(words) == 2 and words[0] in names)


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii").splitlines()
    return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
