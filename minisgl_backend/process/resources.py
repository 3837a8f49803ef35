"""What the project's processes take of a machine by default: processors, OpenMP threads, thread stacks."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# How often libgomp's threads look for work before they sleep, some 0.5 ms: the kernels of a step follow each other in
# less, and waking a thread for each of them cost a sixth of a lone stream's speed.
SPINS = 10_000

# A model of no more than this computes a step sooner on one core than two that wake each other, beside a server that
# needs cores too: through Triton 4 million parameters on two cores 470 tokens/s instead of 360, 25 million (50 MB) 144
# instead of 160.
ONE_CORE_WEIGHT_BYTES = 32 << 20

# libevhtp and RapidJSON inside tritonserver put what a client sends on the stack of an HTTP thread: with the usual
# 8 MiB a form of 4.1 MB, 40,000 nested brackets or 3 MB in one-byte chunks end the server. So large that no body of
# 2 MB does (up to 420 bytes of stack for each of 2,000,000 brackets). A stack is address space until it is touched.
SERVER_STACK_BYTES = 1 << 30
USUAL_STACK_BYTES = 8 << 20

# Each connection of a client is a file. What a shell gives, 1024 as a rule, is for programs that still ask by `select`.
MOST_FILES = 1 << 16

_STRICT_OVERCOMMIT = "2"  # vm.overcommit_memory: address space counts as memory


def usable_cores(sys_folder: Path = Path("/sys")) -> int:
    """Processor cores that this process may run on, less where a container's CPU quota allows less time than that.

    Hardware threads of one core count once: they share the units that compute, and torch's own default is the same.
    """
    cores = len({_core_of(sys_folder, processor) for processor in os.sched_getaffinity(0)})
    for quota in _cpu_quotas(sys_folder / "fs" / "cgroup"):
        cores = min(cores, max(1, math.ceil(quota)))
    return cores


def torch_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of OpenMP and of torch that `environment` does not set.

    Threads that wait actively (libgomp's default) take the processors from whatever else runs and, where there are more
    threads than processors, from each other; these wait so for half a millisecond, then sleep. Without a number of
    threads, a container with few of many processors starts one for each of the many. Weights in huge pages, which torch
    does not ask for by itself, are read 10 to 20% faster.
    """
    defaults = {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(usable_cores()),
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    if "OMP_WAIT_POLICY" not in environment:
        defaults["GOMP_SPINCOUNT"] = str(SPINS)
    return {name: value for name, value in defaults.items() if name not in environment}


def threads_of_rank(ranks: int, weight_bytes: int, environment: Mapping[str, str]) -> int | None:
    """What each of a machine's `ranks` neighbours on the CPU, with so many bytes of weights, is to take of its cores;
    None: what OMP_NUM_THREADS says, which the user has set. All the cores are `torch_defaults`' number, and so nobody's
    wish."""
    cores = usable_cores()
    if environment.get("OMP_NUM_THREADS", str(cores)) != str(cores):
        return None
    return 1 if weight_bytes <= ONE_CORE_WEIGHT_BYTES else max(1, cores // ranks)


def set_torch_defaults() -> None:
    """For this process. In vain once torch is loaded: the variables are read then."""
    if "torch" not in sys.modules:
        os.environ.update(torch_defaults(os.environ))


def raise_file_limit() -> None:
    """Let this process, and what it becomes or starts, have MOST_FILES open, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raise_stack_limit() -> None:
    """Let new threads of the program that this process is about to become have SERVER_STACK_BYTES of stack.

    Nothing changes where the machine bounds them, or where the limit is larger already.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # glibc takes an unlimited stack for one of 2 MiB.
    if stacks_are_free() and (soft == resource.RLIM_INFINITY or soft < SERVER_STACK_BYTES):
        resource.setrlimit(resource.RLIMIT_STACK, (SERVER_STACK_BYTES, hard))


def stacks_are_free() -> bool:
    """False where large stacks are not allowed, or address space counts as memory."""
    try:
        overcommit = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    except OSError:
        overcommit = ""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    large = hard == resource.RLIM_INFINITY or hard >= SERVER_STACK_BYTES
    return (
        large
        and overcommit != _STRICT_OVERCOMMIT
        and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    )


@contextlib.contextmanager
def usual_stack_limit() -> Iterator[None]:
    """Programs started inside have the usual stacks again, where `raise_stack_limit` gave this process larger ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != SERVER_STACK_BYTES:
        yield
        return
    resource.setrlimit(resource.RLIMIT_STACK, (USUAL_STACK_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def _core_of(sys_folder: Path, processor: int) -> str:
    """The same text for all hardware threads of a core."""
    siblings = sys_folder / "devices" / "system" / "cpu" / f"cpu{processor}" / "topology" / "thread_siblings_list"
    try:
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)


def _cpu_quotas(cgroups: Path) -> Iterator[float]:
    """Processors' worth of time that control groups allow: version 2, then 1; a container sees its own at the root."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / int(period)  # "max": no quota, no number
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((cgroups / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((cgroups / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii"))
        if quota_us > 0:
            yield quota_us / period_us
