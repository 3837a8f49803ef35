"""Default limits on what the project's processes use of a machine: processors, OpenMP threads, thread stacks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# How often libgomp's threads poll for work before they sleep, about 0.5 ms: the kernels of a step follow each other
# faster, and waking a thread for each of them made a single stream a sixth slower.
SPINS = 10_000

# A model with weights up to this size computes a step faster on one core than on two that wake each other, alongside a
# server that needs cores, too: through Triton, on two cores, 470 tokens/s instead of 360 with 4 million parameters; 144
# instead of 160 with 25 million (50 MB).
ONE_CORE_WEIGHT_BYTES = 32 << 20

# libevhtp and RapidJSON in tritonserver put a client's data on the stack of an HTTP thread: with the usual 8 MiB, a
# form of 4.1 MB, 40,000 nested brackets or 3 MB in one-byte chunks crash the server. This size suffices for any body of
# 2 MB (up to 420 bytes of stack for each of 2,000,000 brackets). A stack only reserves addresses until it is used.
SERVER_STACK_BYTES = 1 << 30
USUAL_STACK_BYTES = 8 << 20

# Each client connection is a file. A shell's limit, usually 1024, is meant for programs that still use `select`.
MOST_FILES = 1 << 16

_STRICT_OVERCOMMIT = "2"  # vm.overcommit_memory: reserved addresses count as memory


def usable_cores(sys_folder: Path = Path("/sys")) -> int:
    """Number of processor cores that this process may use: those it may run on, limited by a container's CPU quota.

    The hardware threads of one core count once, since they share its execution units; torch's default does the same.
    """
    cores = len({_core_of(sys_folder, processor) for processor in os.sched_getaffinity(0)})
    for quota in _cpu_quotas(sys_folder / "fs" / "cgroup"):
        cores = min(cores, max(1, math.ceil(quota)))
    return cores


def torch_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for OpenMP and torch that `environment` does not set.

    Threads that wait actively (libgomp's default) take processors from other programs and, if there are more threads
    than processors, from each other; with these they wait actively for half a millisecond, then sleep. Without a thread
    count, a container with few of many processors would start a thread for each of the many. Huge pages for weights,
    which torch does not request by itself, make reading them 10 to 20% faster.
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
    """Number of CPU threads for each of a machine's `ranks` ranks, given its bytes of weights; None: the user has set
    OMP_NUM_THREADS. A value equal to all cores does not count as set, since `torch_defaults` sets that."""
    cores = usable_cores()
    if environment.get("OMP_NUM_THREADS", str(cores)) != str(cores):
        return None
    return 1 if weight_bytes <= ONE_CORE_WEIGHT_BYTES else max(1, cores // ranks)


def set_torch_defaults() -> None:
    """Sets them for this process. No effect once torch is loaded, since it reads the variables then."""
    if "torch" not in sys.modules:
        os.environ.update(torch_defaults(os.environ))


def give_back_memory() -> None:
    """Gives the system what is free in this process's heap. A tokenizer of 262,144 words leaves 200 MiB of it behind
    that nothing else will fill. Without effect where the C library is not glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def raise_file_limit() -> None:
    """Raises the limit of open files of this process and its children to MOST_FILES, or as close as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def raise_stack_limit() -> None:
    """New threads of the program that this process will exec get stacks of SERVER_STACK_BYTES.

    Changes nothing if the machine forbids it, or if the limit is larger already.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # glibc treats an unlimited stack as 2 MiB.
    if stacks_are_free() and (soft == resource.RLIM_INFINITY or soft < SERVER_STACK_BYTES):
        resource.setrlimit(resource.RLIMIT_STACK, (SERVER_STACK_BYTES, hard))


def stacks_are_free() -> bool:
    """False if large stacks are not allowed, or if reserved addresses count as memory."""
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
    """Programs started inside get stacks of the usual size, where `raise_stack_limit` enlarged this process's."""
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
    """A text that is the same for all hardware threads of a core."""
    siblings = sys_folder / "devices" / "system" / "cpu" / f"cpu{processor}" / "topology" / "thread_siblings_list"
    try:
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)


def _cpu_quotas(cgroups: Path) -> Iterator[float]:
    """CPU quotas of the control groups, in processors: version 2, then 1; a container sees its own at the root."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / int(period)  # "max" means no quota and is no number
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((cgroups / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((cgroups / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii"))
        if quota_us > 0:
            yield quota_us / period_us
