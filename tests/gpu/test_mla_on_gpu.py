"""Every backend of latents (MLA) of this GPU against the `torch` backend: prefixes, ragged batches, graphs, queries.

FlashInfer's kernels for Hopper and its older ones, and two backends that share batch sizes, count as backends, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.latent.flashinfer import FlashInferLatentBackend
from minisgl_backend.attention.latent.kind import BACKENDS
from minisgl_backend.attention.layer import LatentHeads
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.attention.registry import create_attention, import_failure
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.runner.graphs.whole import CudaGraphRunner, DecodeOutputs, DecodeSteps
from tests.latents import LatentCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEEPSEEK = LatentHeads(rank=512, nope_dim=128, rope_dim=64, v_dim=128)
FLASH = LatentHeads(rank=512, nope_dim=192, rope_dim=64, v_dim=256)  # GLM-4.7-Flash
SIZES = {"16": (DEEPSEEK, 16), "128": (DEEPSEEK, 128), "flash": (FLASH, 20)}  # with query heads
FI_FA2, MIXED = "fi, FA2 kernels", "triton and flashmla"
NAMES = [name for name in BACKENDS if name != "torch"]
NAMES += [FI_FA2, MIXED]


def create(name: str, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> AttentionPair:
    """Of one of NAMES. Skips where it does not run here."""
    if name == MIXED:
        check_backend("flashmla", spec.page_size)
        return create_attention("triton", "flashmla", spec, DecodeByBatch("triton", ((2, 500), (8, math.inf))))
    monkeypatch.setattr(FlashInferLatentBackend, "kernels", "fa2" if name == FI_FA2 else "auto")
    if name == FI_FA2 and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fi takes them by itself here")
    name = name.partition(",")[0]
    check_backend(name, spec.page_size)
    return create_attention(name, name, spec)


def check_backend(name: str, page_size: int) -> None:
    entry, major = BACKENDS[name], torch.cuda.get_device_capability()[0]
    for needed in filter(None, (entry.library.package, entry.library.kernels)):
        if (reason := import_failure(needed)) is not None:
            pytest.skip(f"{name}: {reason}")
    if 10 * major not in entry.capabilities:
        pytest.skip(f"{name} has no kernels for this GPU")
    if entry.page_sizes is not None and page_size not in entry.page_sizes:
        pytest.skip(f"{name} does not serve page size {page_size}")


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return ((out.float() - ref.float()).norm() / ref.float().norm()).item()


@pytest.mark.parametrize(
    ("page_size", "sizes"),
    [(1, "16"), (16, "16"), (64, "16"), (1, "128"), (16, "128"), (64, "128"), (64, "flash")],
)
@pytest.mark.parametrize("name", NAMES)
def test_decode_eager_and_captured(name: str, page_size: int, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, num_q_heads = SIZES[sizes]
    for kv_lens in ([1], [1, 63, 64, 65, 1000, 517, 3000, 2], [100 * i + 1 for i in range(32)]):
        case = LatentCase(heads, num_q_heads, kv_lens, page_size, torch.bfloat16, "cuda", max_rows=34)
        backend, reference = create(name, case.spec, monkeypatch), create_attention("torch", "torch", case.spec)
        backend.allocate_graph(32)
        inputs, q = case.decode_inputs(), case.queries(len(kv_lens))
        expected = reference.attend(case.layer, q, reference.plan(None, inputs))
        assert error(backend.attend(case.layer, q, backend.plan(None, inputs)), expected) < 1e-2
        ones = replace(inputs, kv_lens=inputs.kv_lens.clone().fill_(1), kv_lens_host=case.kv_lens * 0 + 1)
        plan = backend.plan_capture(ones)
        backend.attend(case.layer, q, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.attend(case.layer, q, plan)
        ones.kv_lens.copy_(inputs.kv_lens)
        backend.plan_replay(replace(ones, kv_lens_host=case.kv_lens))
        graph.replay()
        assert error(out, expected) < 1e-2


def test_a_captured_size_has_a_graph_for_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed by the lengths of each step."""
    case = LatentCase(DEEPSEEK, 16, [700, 600], 64, torch.bfloat16, "cuda", max_rows=4)
    attention, reference = create(MIXED, case.spec, monkeypatch), create_attention("torch", "torch", case.spec)
    inputs, q = case.decode_inputs(), case.queries(2)
    inputs.kv_lens.fill_(1)

    def decode(inputs: DecodeInputs, plan: PairPlan) -> DecodeOutputs:
        return DecodeOutputs(logits=attention.attend(case.layer, q, plan), token_ids=inputs.rows)

    graphs = CudaGraphRunner((2,))
    builder: Any = SimpleNamespace(
        padding_inputs=lambda size: replace(inputs, kv_lens_host=np.ones(size, dtype=np.int32))
    )
    graphs.capture(DecodeSteps(decode=decode, warm_up=decode, sample=None), builder, attention)
    outputs = []
    for lens in ([700, 600], [300, 600], [700, 600]):
        lengths = np.array(lens, dtype=np.int32)
        inputs.kv_lens.copy_(torch.from_numpy(lengths))
        step = replace(inputs, kv_lens_host=lengths)
        expected = reference.attend(case.layer, q, reference.plan(None, step))
        graphs.plan_replay(step)
        outputs.append(graphs.replay(2).logits)
        assert error(outputs[-1], expected) < 1e-2
    assert outputs[0] is outputs[2], "one graph"
    assert outputs[0] is not outputs[1], "another for short contexts"
    graphs.close()


@pytest.mark.parametrize(("page_size", "num_q_heads"), [(16, 16), (64, 128)])
@pytest.mark.parametrize("name", NAMES)
def test_drafts(name: str, page_size: int, num_q_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries of a row, each of which sees one token more."""
    queries, kv_lens = 3, [3, 64, 1000, 3001]
    case = LatentCase(DEEPSEEK, num_q_heads, kv_lens, page_size, torch.bfloat16, "cuda", max_rows=16)
    inputs = case.decode_inputs()
    lens = (case.kv_lens[:, None] + np.arange(1 - queries, 1, dtype=np.int32)).reshape(-1)
    inputs = replace(
        inputs, kv_lens=torch.from_numpy(lens).cuda(), kv_lens_host=lens, has_drafts=True,
        rows=inputs.rows.repeat_interleave(queries), rows_host=inputs.rows_host.repeat(queries),
    )  # fmt: skip
    backend, reference = create(name, case.spec, monkeypatch), create_attention("torch", "torch", case.spec)
    q = case.queries(len(lens))
    expected = reference.attend(case.layer, q, reference.plan(None, inputs))
    assert error(backend.attend(case.layer, q, backend.plan(None, inputs)), expected) < 1e-2


@pytest.mark.parametrize(("page_size", "num_q_heads"), [(16, 16), (64, 128)])
def test_latents_in_fp8(page_size: int, num_q_heads: int) -> None:
    """Decoded by `triton`, and stored as by torch; prompts are computed of what is gathered."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("triton converts no FP8 numbers here")
    case = LatentCase(DEEPSEEK, num_q_heads, [1, 63, 64, 1000, 3001], page_size, torch.bfloat16, "cuda", scale=0.02)
    backend, reference = (create_attention(one, one, case.spec) for one in ("triton", "torch"))
    inputs, q = case.decode_inputs(), case.queries(5)
    expected = reference.attend(case.layer, q, reference.plan(None, inputs))
    assert error(backend.attend(case.layer, q, backend.plan(None, inputs)), expected) < 1e-2
    prompts, q = case.prefill_inputs([1, 20, 64, 30, 700]), case.queries(815)
    found, expected = (one.attend(case.layer, q, one.plan(prompts, None)) for one in (backend, reference))
    assert error(found, expected) < 1e-2


@pytest.mark.parametrize(("page_size", "sizes"), [(1, "16"), (64, "16"), (64, "128"), (64, "flash")])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (FI_FA2, MIXED)])
def test_prompts(name: str, page_size: int, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks behind prefixes; keys expanded at once and in pieces."""
    heads, num_q_heads = SIZES[sizes]
    for q_lens, kv_lens in [([7], [7]), ([1, 700, 33, 64], [400, 1000, 33, 3000]), ([300, 200], [300, 200])]:
        case = LatentCase(heads, num_q_heads, kv_lens, page_size, torch.bfloat16, "cuda")
        q = case.queries(sum(q_lens))
        reference = create_attention("torch", "torch", case.spec)
        expected = reference.attend(case.layer, q, reference.plan(case.prefill_inputs(q_lens), None))
        for piece_tokens in (None, 900):
            backend = create(name, case.spec, monkeypatch)
            if piece_tokens is not None:
                (only,) = set(backend.backends[0])
                only._piece_tokens = min(only._piece_tokens, piece_tokens)
            found = backend.attend(case.layer, q, backend.plan(case.prefill_inputs(q_lens), None))
            assert error(found, expected) < 1e-2


@pytest.mark.parametrize(("page_size", "num_q_heads", "num_queries"), [(64, 16, 4), (64, 128, 2), (16, 20, 3)])
def test_several_queries(page_size: int, num_q_heads: int, num_queries: int) -> None:
    """The decode kernel with several query tokens a sequence, each of which sees one token more."""
    from minisgl_backend.attention.latent.reference import TorchLatentBackend
    from minisgl_backend.kernels.attention.latent_decode import (
        LatentDecodeBatch,
        LatentDecodeWorkspace,
        latent_decode_attention,
        latent_decode_shape,
    )

    kv_lens = [5, 64, 1000, 3001, 130]
    case = LatentCase(DEEPSEEK, num_q_heads, kv_lens, page_size, torch.bfloat16, "cuda")
    q = torch.randn(len(kv_lens) * num_queries, num_q_heads, 512, device="cuda").bfloat16()
    q_rope = torch.randn(len(kv_lens) * num_queries, num_q_heads, 192, device="cuda").bfloat16()[..., 128:]
    rows = num_q_heads * num_queries
    workspace = LatentDecodeWorkspace(rows, 512, len(kv_lens), case.device)
    inputs, reference = case.decode_inputs(), TorchLatentBackend(case.spec, case.group)
    batch = LatentDecodeBatch(
        inputs.rows, inputs.kv_lens, inputs.page_table, workspace, latent_decode_shape(len(kv_lens), rows),
        num_queries=num_queries,
    )  # fmt: skip
    found = latent_decode_attention(q, q_rope, case.layer, batch)
    for query in range(num_queries):
        lens = case.kv_lens - (num_queries - 1 - query)
        shorter = replace(inputs, kv_lens=torch.from_numpy(lens).cuda(), kv_lens_host=lens)
        mine, rope = q[query::num_queries], q_rope[query::num_queries]
        expected = reference.attend_latents(case.layer, mine, rope, reference.plan_decode(shorter))
        assert error(found[query::num_queries], expected) < 1e-2


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "scale"), [(1, 20, None), (7, 20, None), (300, 20, None), (7, 0, None), (300, 20, 0.02)]
)
def test_store(num_tokens: int, num_heads: int, scale: float | None) -> None:
    from minisgl_backend.kernels.attention.latent_store import latent_store
    from minisgl_backend.kernels.ops import LatentNormRope, TokenPlaces
    from minisgl_backend.kv.layout import KVScales, LayerKV

    case = LatentCase(DEEPSEEK, 20, [400], 16, torch.bfloat16, "cuda", scale=scale)
    positions = torch.randint(0, 400, (num_tokens,), device="cuda").int()
    slots = (torch.randperm(400, device="cuda")[:num_tokens] + 16).int()
    rotation = LatentNormRope(
        norm=torch.randn(512, device="cuda").bfloat16(), cos_sin=torch.randn(400, 64, device="cuda"), eps=1e-6
    )
    q, latents = (
        case.queries(num_tokens)[:, :num_heads],
        torch.randn(num_tokens, 580, device="cuda").bfloat16()[:, :576],
    )
    found, expected = (case.layer.kv.k.clone() for _ in range(2))
    turned = [
        store(
            q.clone(), latents, rotation, TokenPlaces(positions, slots), LayerKV(cache, cache, KVScales(scale or 1.0))
        )
        for store, cache in ((latent_store, found), (TorchOps().latent_store, expected))
    ]
    assert not num_heads or error(turned[0], turned[1]) < 1e-2
    assert error(found, expected) < 1e-2
