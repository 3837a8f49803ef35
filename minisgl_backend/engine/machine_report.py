"""`python -m minisgl_backend.engine.machine_report`: how the engine would run on this machine, as JSON on one line.

A process of its own, for callers that must go on where torch is missing or broken (`host/doctor.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from minisgl_backend.config import BACKENDS, EngineConfig
from minisgl_backend.engine.idle_cpus import IdleCpus
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError

# Typical of models that fill a GPU.
_USUAL_HEAD = 128


def report() -> dict[str, Any]:
    """The machine's report, with these keys:

    `idle_cpus`: {asks, allowed}; then either `broken`, why torch or the engine cannot be imported, or `torch`:
    {version, cuda, folder, bytecode: whether Python caches its compiled files}; `device`: {kind, name, count};
    `free_bytes` of its memory; on a CPU `cpu_kernels`: why the compiled ones are missing ("": they are there); then
    either `refusal`, why the demo model cannot be served, or `demo`: {dtype, attention, page_size}; `attention`:
    {prefill, decode, page_size, warnings} that auto selects for other models, with heads of `head_dim`, `tried`, what
    auto tries here, best first, and `backends`: for each name why it cannot be chosen (None: it can).
    """
    idle = IdleCpus("auto")
    found: dict[str, Any] = {"idle_cpus": {"asks": idle.asks, "allowed": _may_poll()}}
    try:
        return found | _engine_report()
    except Exception as error:  # a compiled package fails in many ways
        return found | {"broken": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _may_poll() -> bool:
    idle = IdleCpus("poll")
    idle.note(True, 0.0)
    try:
        return idle.awake
    finally:
        idle.close()


def _engine_report() -> dict[str, Any]:
    import torch

    from minisgl_backend.attention.needs import AttentionNeeds
    from minisgl_backend.attention.registry import choose_attention, preferences
    from minisgl_backend.engine.build import resolve_options
    from minisgl_backend.kernels.cpu.library import cpu_kernels
    from minisgl_backend.runner.start.device import MachineFacts, free_bytes

    device = MachineFacts.detect()
    found: dict[str, Any] = {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "folder": str(Path(torch.__file__).parent),
            "bytecode": Path(cache_from_source(torch.__file__)).exists(),
        },
        "device": {"kind": device.kind, "name": device.name, "count": device.count},
        "free_bytes": free_bytes(torch.device(device.kind)),
    }
    if device.kind == "cpu":
        found["cpu_kernels"] = cpu_kernels().refusal
    try:
        runtime, _ = resolve_options(EngineConfig(), Environment.read())
    except ConfigError as error:
        return {**found, "refusal": str(error)}
    found["demo"] = {
        "dtype": runtime.dtype,
        "attention": _pair(runtime.prefill_backend, runtime.decode_backend),
        "page_size": runtime.page_size,
    }
    # The demo model is saved in bfloat16, as most models are.
    needs = AttentionNeeds(compute_capability=device.compute_capability, head_dims=(_USUAL_HEAD,), dtype=runtime.dtype)
    auto = dataclasses.asdict(choose_attention("auto", None, needs))
    refusals: dict[str, str | None] = {}
    for name in BACKENDS:
        try:
            choose_attention(name, None, needs)
            refusals[name] = None
        except ConfigError as error:
            refusals[name] = str(error).removeprefix(f"attention_backend is {name!r}, but {name} ")
    tried = [_pair(*pair) for pair in preferences(needs)]
    return {**found, "attention": {**auto, "head_dim": _USUAL_HEAD, "tried": tried, "backends": refusals}}


def _pair(prefill: str, decode: str) -> str:
    return prefill if prefill == decode else f"{prefill},{decode}"


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # packages that print on import
        found = report()
    print(json.dumps(found))
