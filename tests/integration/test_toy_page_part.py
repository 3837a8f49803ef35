"""A page with a part that does not grow with its tokens, through the whole engine: whole, in chunks, behind a prefix
hit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.environment import Environment
from minisgl_backend.kv.grouping import group_layers
from minisgl_backend.kv.groups import CacheGroup
from minisgl_backend.kv.kinds import FULL, Sliding
from minisgl_backend.kv.layout import LayerCache, MHALayout
from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.runner.start import parts
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import save_checkpoint, save_tokenizer
from tests.toys.page_means import PageMeansBackend, PageMeansLayout

PAGE = 4


def answers(folder: Path, times: int = 1, **options: Any) -> tuple[list[list[list[int]]], int]:
    """Of prompts that begin alike, and the number of their tokens that the prefix cache supplied."""
    generator = random.Random(0)
    shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(22)]
    prompts = [shared + [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 6, 17)]
    environment = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None)
    options |= {"dtype": "float32", "page_size": PAGE, "attention_backend": "torch"}
    with LLM(str(folder), environment=environment, max_seq_len_override=64, **options) as llm:
        found = [llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True) for _ in range(times)]
        return [[output.token_ids for output in outputs] for outputs in found], llm.stats.total_cached_tokens


def test_its_tokens_do_not_depend_on_chunks_and_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint("qwen3-tied-sharded", tmp_path)
    save_tokenizer(tmp_path)
    (plain,), _ = answers(tmp_path, cache_type="naive")

    def attention(_prefill: str, _decode: str, spec: AttentionSpec, *_: Any) -> AttentionPair:
        backends = PageMeansBackend.for_groups(spec, spec.groups)
        return AttentionPair(spec, backends, backends)

    def cache(*args: Any) -> LayerGroup:
        group = kept(*args)
        layout = PageMeansLayout(num_kv_heads=group.num_kv_heads, head_dim=group.head_dim, dtype=group.kv.dtype)
        return replace(group, kv=layout)

    kept = SelfAttention.cache
    monkeypatch.setattr(SelfAttention, "cache", cache)
    monkeypatch.setattr(parts, "create_attention", attention)
    (whole,), cached = answers(tmp_path, cache_type="naive")
    assert whole != plain
    assert cached == 0
    (chunks,), _ = answers(tmp_path, cache_type="naive", max_prefill_length=5, mixed_prefill_length=5)
    assert chunks == whole
    behind_prefixes, cached = answers(tmp_path, times=2)
    assert behind_prefixes == [whole, whole]
    assert cached > 60


def test_its_bytes_count() -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    small, large = (PageMeansLayout(**sizes).bytes_per_page(size) for size in (PAGE, 2 * PAGE))  # type: ignore[arg-type]
    plain = MHALayout(**sizes).bytes_per_page(PAGE)  # type: ignore[arg-type]
    assert (small, large) == (plain + plain // PAGE, 2 * plain + plain // PAGE)
    # Two pages of the one layer are one of the other in keys and values, but not in what they have as a whole.
    half = PageMeansLayout(num_kv_heads=1, head_dim=8, dtype=torch.float32)
    caches = [LayerCache(FULL, half), LayerCache(Sliding(8), PageMeansLayout(**sizes))]  # type: ignore[arg-type]
    assert len(group_layers(caches, PAGE, 64).groups) == 2
    caches[0] = LayerCache(FULL, MHALayout(num_kv_heads=1, head_dim=8, dtype=torch.float32))
    assert group_layers(caches, PAGE, 64).groups == (CacheGroup(),)
