"""Others hear of each compilation."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minisgl_backend.runner.start.compiling import announce_compiling


def test_a_compilation_is_announced_and_its_end_too_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("triton.compiler")
    heard: list[str] = []

    def compile_kernel(source: str, target: str = "") -> str:
        heard.append(f"compile {source} for {target}")
        if source == "wrong":
            raise ValueError(source)
        return "kernel"

    monkeypatch.setattr(compiler, "compile", compile_kernel)
    announce_compiling("cpu", lambda: heard.append("begin"), lambda: heard.append("end"))
    assert compiler.compile is compile_kernel
    announce_compiling("cuda", lambda: heard.append("begin"), lambda: heard.append("end"))
    assert compiler.compile("source", target="sm_90") == "kernel"
    with pytest.raises(ValueError, match="wrong"):
        compiler.compile("wrong")
    assert heard == ["begin", "compile source for sm_90", "end", "begin", "compile wrong for ", "end"]


def test_triton_hashes_itself_before_the_first_kernel_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton.compiler"), "compile", None)
    cache = pytest.importorskip("triton.runtime.cache")
    asked = threading.Event()
    monkeypatch.setattr(cache, "triton_key", asked.set)
    announce_compiling("cuda", lambda: None, lambda: None)
    assert asked.wait(60)
    assert "triton_key()" in inspect.getsource(cache.get_cache_key)


def test_a_kernel_takes_the_compiler_from_there_at_its_first_launch() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    source = inspect.getsource(jit.JITFunction.create_binder)
    assert "from ..compiler import" in source
    assert "self.compile = compile" in source


AHEAD = """
import torch, triton, triton.language as tl
from concurrent.futures import ThreadPoolExecutor
from triton.backends.compiler import GPUTarget
from minisgl_backend.runner.start import compiling

class Driver:  # a GPU that is not there: its kernels can be compiled, and not launched
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())

@triton.jit
def fill(out_ptr, value, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), value)

from minisgl_backend.kernels.sampling import launch as sampling
compiling.name_kernels()
assert all(one.hash for one in vars(sampling).values() if isinstance(one, triton.JITFunction))

kept = torch.ones(64, dtype=torch.int32)
with compiling.compiling_ahead() as done:
    for value in (5, 6, 7):
        fill[(1,)](kept, value, SIZE=64)
        fill[(1,)](kept, value, SIZE=32)
    fill[(1,)](kept[1:], 5, SIZE=32)
    fill[(1,)](kept, 16, SIZE=32)
    made = torch.empty(9, dtype=torch.int32), torch.empty_like(kept)
assert done.count == 4, done.count
assert kept.tolist() == [1] * 64
assert not made[0].any() and not made[1].any()
(cache, *_), = fill.device_caches.values()
assert len(cache) == 4, cache
cache.clear()
with compiling.compiling_ahead() as again:
    fill[(1,)](kept, 5, SIZE=64)
    assert triton.knobs.compilation.listener == again.note
assert again.count == 0, "it comes from Triton's cache"
assert triton.knobs.compilation.listener is None
try:
    fill[(1,)](kept, 5, SIZE=64)
except AttributeError as error:
    assert "Driver" in str(error), error
else:
    raise SystemExit("behind it kernels are launched, which this driver cannot")
"""


def test_kernels_are_compiled_ahead_and_not_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = tmp_path / "ahead.py"  # Triton reads the source of a kernel
    program.write_text(AHEAD)
    subprocess.run([sys.executable, str(program)], env=environment, check=True, timeout=300)
