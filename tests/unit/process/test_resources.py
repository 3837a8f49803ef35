"""What processes take of a machine: OpenMP's threads and how they wait, thread stacks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.process.resources import (
    MOST_FILES,
    ONE_CORE_WEIGHT_BYTES,
    SERVER_STACK_BYTES,
    SPINS,
    USUAL_STACK_BYTES,
    stacks_are_free,
    threads_of_rank,
    torch_defaults,
    usable_cores,
)
from minisgl_backend.process.spawn import start_child

ROOT = Path(__file__).parents[3]


def test_openmp_waits_passively_unless_the_user_says_otherwise() -> None:
    assert torch_defaults({}) == {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": str(usable_cores()),
        "THP_MEM_ALLOC_ENABLE": "1",
        "GOMP_SPINCOUNT": str(SPINS),
    }
    assert torch_defaults({"GOMP_SPINCOUNT": "5"})["OMP_WAIT_POLICY"] == "passive"
    assert "GOMP_SPINCOUNT" not in torch_defaults({"GOMP_SPINCOUNT": "5"})
    assert torch_defaults({"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "3", "THP_MEM_ALLOC_ENABLE": "0"}) == {}


def test_ranks_share_the_cores_that_a_quota_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.process.resources.usable_cores", lambda: 8)
    large = ONE_CORE_WEIGHT_BYTES + 1
    assert [threads_of_rank(ranks, large, {}) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert threads_of_rank(2, large, torch_defaults({})) == 4, "the default is nobody's wish"
    assert [threads_of_rank(ranks, ONE_CORE_WEIGHT_BYTES, {}) for ranks in (1, 2, 16)] == [1, 1, 1]
    for wish in ("1", "3", "16", "4,2"):
        assert threads_of_rank(2, 1, {"OMP_NUM_THREADS": wish}) is None


def child_says(code: str, **environment: str) -> str:
    base = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**base, **environment}, capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("environment", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_llm_sets_it_before_torch_is_there(environment: dict[str, str], policy: str) -> None:
    code = """
import os, sys
from minisgl_backend import LLM
assert "torch" not in sys.modules
LLM("demo", runner="null", num_pages=64).close()
print(os.environ["OMP_WAIT_POLICY"])
"""
    assert child_says(code, **environment) == policy


def test_children_get_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says_environment.py").write_text(
        "import os, pathlib, sys\n"
        "keys = 'OMP_WAIT_POLICY', 'OMP_NUM_THREADS', 'MINISGL_ADMIN_KEY'\n"
        "pathlib.Path(sys.argv[1]).write_text(''.join(os.environ.get(key, '') for key in keys))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MINISGL_ADMIN_KEY", "secret")  # which they get not
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    child = start_child("says_environment", [str(tmp_path / "said")], fds=(), tied=False)
    assert child.wait(60) == 0
    assert child.stdin is not None
    child.stdin.close()
    assert (tmp_path / "said").read_text() == f"passive{usable_cores()}"


def sys_folder(path: Path, cpu_max: str = "", siblings: dict[int, str] | None = None) -> Path:
    (path / "fs" / "cgroup").mkdir(parents=True)
    if cpu_max:
        (path / "fs" / "cgroup" / "cpu.max").write_text(cpu_max)
    for processor, text in (siblings or {}).items():
        topology = path / "devices" / "system" / "cpu" / f"cpu{processor}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text)
    return path


def test_cores_are_those_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert usable_cores(sys_folder(tmp_path / "plain")) == 4
    assert usable_cores(sys_folder(tmp_path / "free", "max 100000\n")) == 4
    assert usable_cores(sys_folder(tmp_path / "quota", "150000 100000\n")) == 2
    assert usable_cores(sys_folder(tmp_path / "little", "5000 100000\n")) == 1
    pairs = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}
    assert usable_cores(sys_folder(tmp_path / "hyperthreads", siblings=pairs)) == 2


def test_a_shells_limit_of_files_is_none_of_the_servers() -> None:
    code = """
import resource
from minisgl_backend.process.resources import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limits in ((128, hard), (128, 512), (128, 128)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    raise_file_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard)
"""
    raised, hard, *others = map(int, child_says(code).split())
    assert raised == (MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))
    assert others[::2] == [512, 128]


def test_stacks_are_large_for_the_server_and_usual_for_its_children() -> None:
    """In a process of its own: limits are a process's."""
    code = """
import resource, subprocess, sys
from minisgl_backend.process.resources import raise_stack_limit, usual_stack_limit
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
def child():
    ask = "import resource; print(resource.getrlimit(resource.RLIMIT_STACK)[0])"
    print(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
with usual_stack_limit():
    child()
raise_stack_limit()
child()
with usual_stack_limit():
    child()
child()
"""
    if not stacks_are_free():
        pytest.skip("this machine bounds stacks or address space")
    stacks = [int(line) for line in child_says(code).split()]
    assert stacks == [USUAL_STACK_BYTES, SERVER_STACK_BYTES, USUAL_STACK_BYTES, SERVER_STACK_BYTES]
