"""Others hear of each compilation."""

from __future__ import annotations

import inspect

import pytest

from minisgl_backend.runner.compiling import announce_compiling


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


def test_a_kernel_takes_the_compiler_from_there_at_its_first_launch() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    source = inspect.getsource(jit.JITFunction.create_binder)
    assert "from ..compiler import" in source
    assert "self.compile = compile" in source
