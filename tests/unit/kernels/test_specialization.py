"""No kernel is compiled for a number that changes from step to step: streams would wait for the compiler.

Triton compiles a kernel anew where an integer becomes 1, or a multiple of 16, or a pointer one of 16 bytes. What it
looks at is asked of Triton itself, without its interpreter and without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PARAMETERS = """
import importlib, pkgutil
from triton.runtime.jit import JITFunction
import minisgl_backend.kernels

# Integers that are constant for a model or an engine, and whose divisors make loads wide: row strides of matrices and
# tables, which are even in every step.
CONSTANT = {
    "x_stride": "a row of hidden states, or of activations between two GEMMs",
    "out_stride": "the same; where it is the rows of a step it must be unspecialised, see CHANGING",
    "q_stride": "a row of queries", "q_stride_t": "a row of queries", "q_stride_h": "a head",
    "qkv_stride": "a row of the projection", "stride": "a row of a table or of gate and up",
    "gates_stride": "a row of the projection",
    "size": "outputs of gate, or of up",
    "kv_stride_page": "the pool's", "kv_stride_head": "the pool's", "kv_stride_token": "the pool's",
    "table_stride": "pages of a row, at most", "tokens_stride": "tokens of a row, at most",
    "logits_stride": "the vocabulary, or the experts", "params_stride": "sampling parameters of a row",
    "counts_stride": "the vocabulary", "counters_stride": "rows, at most", "prefixes_stride": "tokens, at most",
    "states_stride": "a layer's slots", "conv_stride": "a layer's slots", "k_stride": "a layer's tails",
    "u_stride": "a layer's tails", "g_stride": "a layer's tails", "ring_stride": "a layer's tails",
    "result_stride": "a row of activations", "a_stride": "an adapter's slot", "b_stride": "an adapter's slot",
    "max_rules": "rules of a row, at most", "source_stride": "what another rank may send at once",
}
# Numbers that Triton does not specialise.
FLOATS = {"eps", "l2_eps", "scale_log2", "q_scale", "beta_scale", "k_inverse", "v_inverse", "v_scale"}
DESCRIPTORS = {"weight", "values"}
# Of these kernels a stride is the number of rows of a step.
CHANGING = {("sample_kernel", "out_stride"), ("settle_kernel", "out_stride"), ("logprob_collect_kernel", "out_stride")}

kernels, wrong = {}, []
for info in pkgutil.walk_packages(minisgl_backend.kernels.__path__, "minisgl_backend.kernels."):
    module = importlib.import_module(info.name)
    for name, function in vars(module).items():
        if isinstance(function, JITFunction) and name.endswith("_kernel") and function.fn.__module__ == info.name:
            kernels[info.name, name] = function
assert len(kernels) > 25, len(kernels)
for (module, name), kernel in kernels.items():
    for parameter in kernel.params:
        if parameter.is_constexpr or parameter.name.endswith("_ptr") or parameter.do_not_specialize:
            continue
        constant = parameter.name in CONSTANT and (name, parameter.name) not in CHANGING
        if not constant and parameter.name not in FLOATS | DESCRIPTORS:
            wrong.append(f"{module}.{name}: {parameter.name}")
assert not wrong, wrong
"""

# Notes what Triton would compile, in place of every launch.
STEPS = """
import functools
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:  # a GPU that is not there
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
variants = {}  # (kernel, what it is compiled for): how it came to be needed
reason = ""

def record(kernel, *args, grid, warmup, **options):
    options["debug"] = False
    binder = kernel.device_caches[0][-1]
    _, specialization, others = binder(*args, **options)
    key = (kernel.fn.__name__, str(specialization), str(sorted((k, str(v)) for k, v in others.items())))
    variants.setdefault(key, reason)

JITFunction.run = record
from minisgl_backend.kernels import triton_ops
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import EarlyRouter, Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.kernels.attention import choose as attention_choice, decode as decode_attention
from minisgl_backend.kernels.attention.calls import CachedLayer
from minisgl_backend.kernels.moe import grouped as moe
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.runner.start.warm_up import StepLimits, decode_plans, sampled_plans, warm_up_plans

HIDDEN, SIZE, HEADS, DIM, PAGE = 64, 64, 8, 16, 16

class NoLibrary:
    def linear(self, *args): return None

def make_ops():
    ops = triton_ops.TritonOps(torch.device("cpu"), facts=DeviceFacts.named("h200"))
    device = GemmDevice(ops)
    device.tuned, device.workspace = NoLibrary(), LinearWorkspace(torch.device("cpu"), 512, 8)
    return PlainKernels(device)

plain = make_ops()
mixtures = ExpertsKernels("plain", TritonMixtureKernels(plain))
ops = plain.ops
bf16 = dict(dtype=torch.bfloat16)
norm = torch.ones(HIDDEN, **bf16)

@functools.cache
def weight(*shape):
    return torch.empty(shape, **bf16)

def dense(tokens, kv_heads):
    x = torch.empty(tokens, HIDDEN, **bf16)
    qkv = plain.linear(x, weight((HEADS + 2 * kv_heads) * DIM, HIDDEN), GemmCall(norm, 1e-6))
    cache = weight(4, kv_heads, PAGE, DIM)
    rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=torch.empty(64, DIM), eps=1e-6)
    ints = torch.empty(tokens, dtype=torch.int32)
    ops.rope_store(qkv, rotation, TokenPlaces(ints, torch.empty_like(ints)), LayerKV(cache, cache), HEADS)
    gated = plain.linear(x, weight(2 * SIZE, HIDDEN), GemmCall(norm, 1e-6, activation="silu"))
    return plain.linear(gated, weight(HIDDEN, SIZE), GemmCall(residual=x))

def mixture(tokens, experts, k):
    x = torch.empty(tokens, HIDDEN, **bf16)
    weights = Experts(gate_up=weight(experts, 2 * SIZE, HIDDEN), down=weight(experts, HIDDEN, SIZE),
                      num_experts=experts, hidden_size=HIDDEN, intermediate_size=SIZE, experts_per_token=k)
    call = MixtureCall(router=weight(experts, HIDDEN), norm_weight=norm, eps=1e-6, residual=x)
    mixtures(x, weights, call)
    if tokens == 1:
        mixtures(x, weights, call._replace(early=EarlyRouter(weight(HIDDEN, HIDDEN), weight(experts, 2 * HIDDEN))))

def decode(batch, kv_heads, group, num_sms, can_share, workspace, alone):
    # Beside a prompt, and where that is slower, rotation is a kernel of its own.
    shape = attention_choice.decode_shape(batch, kv_heads, group, num_sms, can_share)
    heads, cache = kv_heads * group, weight(4, kv_heads, PAGE, DIM)
    ints = torch.empty(batch, dtype=torch.int32)
    pdl = batch <= attention_choice.MAX_EARLY_BATCH
    layer = CachedLayer(kv=LayerKV(cache, cache), scale=1.0)
    table = torch.zeros(batch, 4, dtype=torch.int32)
    step = decode_attention.DecodeBatch(ints, ints, table, workspace, shape, pdl)
    if alone and attention_choice.rotation_pays(batch, kv_heads, num_sms):
        qkv = torch.empty(batch, (heads + 2 * kv_heads) * DIM, **bf16)
        rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=torch.empty(64, DIM), eps=1e-6)
        decode_attention.rotating_decode_attention(qkv, rotation, layer, step)
    else:
        decode_attention.decode_attention(torch.empty(batch, heads, DIM, **bf16), layer, step)

def sizes_of(plan):
    return sum(len(chunk.token_ids) for chunk in plan.prefill) + len(plan.decode_rows), len(plan.decode_rows)


def check(max_running, max_prefill, max_seq_len, experts, k, kv_heads, group, num_sms, can_share):
    global reason
    variants.clear()
    counts = moe.token_counts(experts, k)
    limits = StepLimits(max_running, max_prefill, max_seq_len, counts)
    workspace = decode_attention.DecodeWorkspace(max_running + 1, group * kv_heads, kv_heads, DIM, torch.device("cpu"))
    attention = (kv_heads, group, num_sms, can_share)
    firsts = attention_choice.distinct_batches(max_running, *attention, workspace.parts)
    beside = [*warm_up_plans(limits, firsts), *sampled_plans(limits.longest)]
    plans = [*beside, *decode_plans(max_running, firsts)]
    reason = "start"
    for tokens, rows in dict.fromkeys(map(sizes_of, plans)):
        dense(tokens, kv_heads)
        mixture(tokens, experts, k)
        if rows:
            decode(rows, *attention, workspace, alone=tokens == rows)
    most = max(min(max_prefill, max_running * (max_seq_len - 1)), min(max_prefill, max_seq_len - 1) + max_running - 1)
    some = {*range(1, 70), *range(70, most, 29), *range(most - 20, most + 1)}
    for tokens in sorted(tokens for tokens in some if 0 < tokens <= most):
        reason = f"{tokens} tokens"
        dense(tokens, kv_heads)
        mixture(tokens, experts, k)
    for rows in range(1, max_running + 1):
        for alone in (False, True)[rows == max_running :]:
            reason = f"{rows} rows decode, alone: {alone}"
            decode(rows, *attention, workspace, alone)
    late = sorted((found, key) for key, found in variants.items() if found != "start")
    assert not late, "\\n".join(f"{found}: {key[0]} {key[1]} {key[2]}" for found, key in late[:8])
    assert len(variants) > 20

for limits in LIMITS:
    print(limits, flush=True)  # the last ones are those that failed
    check(*limits)
"""

# In every run those of which each is a case of its own: mixtures and a dense model, many rows and few, shared tiles.
FIRST = 4
# max_running, max_prefill, max_seq_len, experts, of a token, KV heads, query heads of each, multiprocessors, whether
# programs of decode attention may share tiles.
LIMITS = (
    (5, 1500, 128, 64, 6, 1, 8, 132, True),
    (1, 600, 4096, 16, 1, 8, 1, 132, True),
    (17, 600, 300, 300, 10, 1, 8, 132, False),
    (256, 256, 4096, 16, 1, 8, 8, 58, True),  # an L4
    (256, 2048, 4096, 128, 8, 4, 2, 132, True),
    (520, 256, 4096, 128, 8, 4, 8, 132, False),
    (600, 256, 4096, 16, 1, 2, 2, 132, True),
    (256, 256, 4096, 16, 1, 8, 8, 78, True),
    (256, 256, 4096, 16, 1, 1, 8, 148, True),
)


def run_python(program: str, folder: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    path = folder / "program.py"  # Triton reads the source of a kernel
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]


def test_no_kernel_is_compiled_for_a_number_that_changes(tmp_path: Path) -> None:
    run_python(PARAMETERS, tmp_path)


def test_a_start_needs_every_kernel_that_a_step_can_need(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Of dense layers, of mixtures and of decode attention, whatever the number of tokens and rows is."""
    limits = LIMITS if pytestconfig.getoption("--full", default=False) else LIMITS[:FIRST]
    run_python(STEPS.replace("LIMITS", f"{limits}"), tmp_path)
