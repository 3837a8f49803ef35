"""That kernels with many stages fit the GPUs that the documents promise, as the compiler makes them: without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.3", reason="how a kernel is compiled for another machine has changed")

LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # bytes of a program, by compute capability
COMPILES = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.moe import grouped as moe
from minisgl_backend.kernels.attention import decode as decode_attention, prefill as prefill_attention
from minisgl_backend.kernels.attention import latent_decode, latent_prefill, latent_store
from minisgl_backend.kernels.linear.plain import small_rows as small_linear, vector
from minisgl_backend.kernels.recurrent import chunk as delta_chunk, fold as delta_fold, window as delta_window
from minisgl_backend.kernels.recurrent.window_drafts import drafts_kernel
from minisgl_backend.kv.state_config import StateConfig

POINTERS = {"x_ptr", "weight_ptr", "norm_ptr", "bias_ptr", "residual_ptr", "out_ptr", "q_ptr", "k_ptr", "v_ptr",
            "q_norm_ptr", "k_norm_ptr", "kv_ptr", "key_ptr", "q_rope_ptr", "latent_ptr", "cache_ptr", "mixed_ptr",
            "solved_ptr", "scores_ptr", "b_ptr", "conv_ptr", "tail_k_ptr", "tail_conv_ptr"}
COUNTS = {"counters_ptr", "order_ptr", "expert_ptr", "first_ptr", "end_ptr", "cu_seqlens_ptr", "kv_lens_ptr",
          "rows_ptr", "table_ptr", "parts_ptr", "segments_ptr", "positions_ptr", "slots_ptr", "blocks_ptr", "lens_ptr",
          "first_ranks_ptr", "slot_ptr", "border_ptr", "sources_ptr", "targets_ptr", "starts_ptr", "borders_ptr",
          "shifts_ptr"}
FLOATS = {"hidden_ptr", "partial_ptr", "pair_weight_ptr", "sinks_ptr", "lse_ptr", "cos_sin_ptr", "states_ptr",
          "tail_u_ptr", "tail_g_ptr", "a_log_ptr", "dt_bias_ptr", "vectors_ptr", "decays_ptr"}

def shared(kernel, capability, number, num_warps, num_stages, **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in POINTERS:
            return "*" + number
        if name in FLOATS:
            return "*fp32"
        scalars = ("eps", "scale_log2", "v_scale", "k_inverse", "v_inverse", "l2_eps", "q_scale", "beta_scale")
        return "*i32" if name in COUNTS else "fp32" if name in scalars else "i32"
    names = kernel.arg_names
    signature = {name: kind(name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or "stride" in name}
    source = ASTSource(fn=kernel, signature=signature, attrs=aligned,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared

def linear(capability, limit, rows, size_out, size_in):
    cut = small_linear.linear_shape(rows, size_out, size_in, shared=limit)
    assert not cut.vector and cut.slices == 1
    return shared(small_linear._linear_kernel, capability, "bf16", cut.num_warps, cut.num_stages, NORM_FIRST=False,
                  SIZE_OUT=size_out, SIZE_IN=size_in, SPLIT=1, PART=size_in, ROWS=16, TILE_OUT=cut.tile_out,
                  TILE_IN=cut.tile_in, EARLY=0, NORM=False, BIAS=False, RESIDUAL=True, GATED=False, ACTIVATION=None,
                  PDL=False)

def grouped(capability, limit, number, pairs, gated, biased=0):
    shape = moe.moe_shape(128 * pairs, 128, 2 if number == "bf16" else 4, limit)
    tile_out, tile_in, num_warps, num_stages = shape.gate_up if gated else shape.down
    return shared(moe._grouped_kernel, capability, number, num_warps, num_stages, K=8, SIZE_OUT=768 if gated else 2048,
                  SIZE_IN=2048 if gated else 768, TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in,
                  GATED=bool(gated), ACTIVATION="swiglu_oai" if biased else "silu", BIAS=bool(biased), PDL=False)

def prefill(capability, limit, head_dim):
    fits = prefill_attention.long_tiles_fit(head_dim, limit)
    return shared(prefill_attention._prefill_kernel, capability, "bf16", 8 if fits else 4, 2, GROUP=2, NUM_Q_HEADS=8,
                  PAGE_SIZE=64, HEAD_DIM=head_dim, HEAD_PADDED=triton.next_power_of_2(head_dim),
                  TILE_Q=128 if fits else 32, TILE_KV=64, CAUSAL=True, WINDOW=0, SOFT_CAP=None, FP8=False,
                  sinks_ptr=None)

def capped(capability, limit, head_dim):
    # Kernels with a soft cap and sinks, or another activation than silu: they compile at all.
    common = dict(GROUP=2, NUM_Q_HEADS=8, PAGE_SIZE=64, HEAD_DIM=head_dim,
                  HEAD_PADDED=triton.next_power_of_2(head_dim), WINDOW=128, SOFT_CAP=50.0, FP8=False)
    decode = dict(NUM_SPLITS=4, TILE=64, GROUP_PADDED=16, NUM_KV_HEADS=4, HEADS_MERGED=2, SPLITS_PADDED=4, NORM=False,
                  LARGEST=1.0, NATIVE=True, EARLY=False, AT_ONCE=4, PDL=False)
    small = dict(SIZE_OUT=512, SIZE_IN=1024, TILE_OUT=2, TILE_IN=1024, NORM=True, BIAS=False, RESIDUAL=False,
                 GATED=True, PDL=False)
    return max(
        shared(prefill_attention._prefill_kernel, capability, "bf16", 4, 2, TILE_Q=32, TILE_KV=64,
               CAUSAL=True, **common),
        *(shared(decode_attention.decode_kernel, capability, "bf16", 4, 3, ROTATE=rotate, **common, **decode)
          for rotate in (False, True)),
        *(shared(vector._vector_kernel, capability, "bf16", 4, 1, ROWS=1, ROWS_PADDED=1, ACTIVATION=name, RANK=rank,
                 ALL_RANKS=2 * rank, RANK_PARTS=rank // 4, RANK_PARTS_PADDED=rank // 4, **small)
          for name, rank in (("gelu", 0), ("gelu_tanh", 0), ("gelu", 16))),
    )

def stored(capability, limit, fp8):
    # That latents are stored at all, as they are and in FP8.
    return shared(latent_store._latent_store_kernel, capability, "bf16", 2, 3, NUM_HEADS=16, NOPE=128, RANK=512,
                  RANK_PADDED=512, HALF=32, HALF_PADDED=32, HEADS=8, PAGE_SIZE=64, FP8=bool(fp8), LARGEST=448.0,
                  PDL=False)

def latents(capability, limit, number, heads, batch, fp8=0):
    cut = latent_decode.latent_decode_shape(batch, heads, 132, limit, half_precision=number == "bf16")
    return shared(latent_decode._latent_decode_kernel, capability, number, cut.num_warps, cut.num_stages, MAX_BATCH=64,
                  TILE=cut.tile, PAGE_SIZE=64, ROWS=cut.rows, NUM_ROWS=heads, NUM_HEADS=heads, QUERIES=1,
                  RANK=512, RANK_PADDED=512, ROPE=64, ROPE_PADDED=64, FP8=bool(fp8), PDL=False)

def expanded(capability, limit, number, nope, value):
    sizes = (triton.next_power_of_2(nope), 64, triton.next_power_of_2(value))
    tile_q, tile_kv = latent_prefill.prefill_tiles(sizes, 2 if number == "bf16" else 4, 1000, limit)
    return shared(latent_prefill._latent_prefill_kernel, capability, number, 8 if tile_q == 128 else 4, 2, NUM_HEADS=16,
                  NOPE=nope, NOPE_PADDED=sizes[0], ROPE=64, ROPE_PADDED=64, V=value, V_PADDED=sizes[2], TILE_Q=tile_q,
                  TILE_KV=tile_kv)

STATES = dict(HK=16, HV=32, DK=128, DK_PADDED=128, DV=128)

def chunk(capability, limit, number):
    # Both launches of the delta rule over a prompt's chunks.
    size, exact = 2 if number == "bf16" else 4, number != "bf16"
    cut = delta_chunk.chunk_shape(128, 128, limit, size)
    blocks = dict(BLOCK=64, COLUMNS=6, EXACT=exact, **STATES)
    return max(
        shared(delta_chunk._solve_kernel, capability, number, 4, 3, **blocks),
        shared(delta_chunk._states_kernel, capability, number, cut.num_warps, 3, TILE=cut.tile, WIDTH=4,
               WIDTH_PADDED=4, LENGTH=32, RING=4, ROW_COLUMNS=9, STAGES=cut.num_stages, **blocks),
    )

def window(capability, limit, page_size, drafts, k_dim=128, v_dim=128):
    # A decode step's window, and the fold.
    config = StateConfig(num_k_heads=16, num_v_heads=32, k_dim=k_dim, v_dim=v_dim, conv_width=4)
    padded = triton.next_power_of_2(v_dim)
    rings = dict(STATES, WIDTH=4, LENGTH=page_size + drafts, RING=4 + 2 * drafts, DK=k_dim, DV=v_dim)
    page = dict(PDL=False, TAIL=page_size, **rings)
    rows, part = delta_window.row_tiles(config)
    several = dict(DV_PADDED=padded, ENTRIES=4, ROWS=16, TILE=32, STAGES=3)
    return max(
        shared(delta_fold._fold_kernel, capability, "bf16", 4, 3, TILE=delta_fold.TILE,
               TILES=-(-v_dim // delta_fold.TILE), WIDTH_PADDED=4, TAIL=32, **rings),
        shared(delta_window._whole_kernel, capability, "bf16", 4, 3, DV_PADDED=padded, WARPS=4, **page),
        shared(delta_window._rows_kernel, capability, "bf16", 1, 3, DV_PADDED=padded, ROWS=rows, PART=part, **page),
        shared(drafts_kernel, capability, "bf16", 2, 3, **several, **page),
    )

ways = {"chunk": chunk, "window": window, "latents": latents, "stored": stored, "expanded": expanded,
        "capped": capped, "linear": linear, "grouped": grouped, "prefill": prefill}
print(json.dumps([ways[way](*arguments) for way, *arguments in json.loads(sys.argv[1])]))
"""


# Those with the least room for each kernel.
TIGHT = [
    ("linear", 89, 16, 4096, 12288),
    ("grouped", 89, "bf16", 100, 1),
    ("grouped", 89, "fp32", 100, 0),
    ("capped", 90, 256),
    ("prefill", 120, 256),
    ("stored", 90, 0),
    ("window", 89, 32, 3, 96, 192),
]
OTHERS = [
    *(("linear", capability, 16, 4096, 12288) for capability in (80, 120)),
    *(("grouped", capability, "bf16", 100, 1) for capability in (80, 120)),
    ("grouped", 89, "bf16", 100, 0),
    ("grouped", 90, "fp32", 100, 0),
    *(("grouped", 90, "bf16", pairs, 1, 1) for pairs in (10, 100)),
    *(("capped", 90, head_dim) for head_dim in (80, 128)),
    ("prefill", 89, 256),
    *(("latents", *row) for row in ((90, "bf16", 128, 64), (90, "bf16", 16, 64), (80, "bf16", 128, 64))),
    *(("latents", *row) for row in ((89, "bf16", 128, 64), (89, "bf16", 16, 1), (89, "fp32", 16, 1))),
    ("latents", 90, "bf16", 128, 64, 1),
    ("stored", 90, 1),
    *(("expanded", *row) for row in ((90, "bf16", 192, 256), (80, "bf16", 192, 256), (89, "bf16", 128, 128))),
    *(("expanded", *row) for row in ((89, "bf16", 192, 256), (89, "fp32", 192, 256))),
    *(("chunk", *row) for row in ((90, "bf16"), (89, "bf16"), (80, "bf16"), (120, "fp32"))),
    ("window", 89, 32, 3),
    ("window", 90, 64, 3),
]


@pytest.mark.parametrize("kernels", [TIGHT, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["tight", "others"])
def test_kernels_fit_the_gpus_that_are_served(kernels: list[tuple[Any, ...]]) -> None:
    calls = [(way, capability, LIMITS[capability], *rest) for way, capability, *rest in kernels]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILES, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    taken = dict(zip(kernels, json.loads(done.stdout), strict=True))
    assert {kernel: taken[kernel] for kernel in kernels if taken[kernel] > LIMITS[kernel[1]]} == {}


def test_a_gpu_with_room_takes_what_was_measured() -> None:
    from minisgl_backend.kernels.attention.prefill import long_tiles_fit
    from minisgl_backend.kernels.linear.plain import tiling
    from minisgl_backend.kernels.moe import grouped as moe

    for rows in (2, 3, 8, 16):
        for size_out, size_in in ((1024, 3072), (4096, 4096), (5120, 5120), (4096, 12288), (5120, 25600), (2048, 4096)):
            measured = tiling._measured_shape(rows, size_out, size_in, False, 132)
            assert tiling.linear_shape(rows, size_out, size_in) == measured
    for pairs in (4, 16, 30, 100):
        assert moe.moe_shape(128 * pairs, 128) == moe._measured_shape(128 * pairs, 128)
    assert long_tiles_fit(256, LIMITS[90])
