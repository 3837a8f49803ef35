"""What attention backends serve, next to SGLang's marks: docs/models.md has the table that is generated here from the
registry, and what it denies is refused by name. `python -m tests.docs.test_attention_features` writes it anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from minisgl_backend.attention.latent.kind import BACKENDS as MLA
from minisgl_backend.attention.mha import BACKENDS as MHA
from minisgl_backend.attention.mha import MHAEntry
from minisgl_backend.attention.needs import AttentionNeeds, Scores
from minisgl_backend.attention.registry import choose_attention
from minisgl_backend.config import BACKENDS
from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import FP8_E4M3
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.messages import text_of
from minisgl_backend.serving.tensors import TENSORS
from tests.docs.blocks import ROOT
from tests.docs.test_backends_table import capabilities, listed

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table features -->", "<!-- /table features -->"
NOTHING = "-"  # the question does not arise


def of_keys(cell: Callable[[MHAEntry], str]) -> Callable[[str], str]:
    return lambda name: cell(MHA[name]) if name in MHA else NOTHING


COLUMNS: dict[str, Callable[[str], str]] = {
    "page size above 1": lambda name: listed((MHA.get(name) or MLA[name]).page_sizes),
    "FP8 cache": of_keys(lambda entry: capabilities(entry.fp8_capabilities)),
    # With drafts a row has several entries in a decode step, of which a backend need not know (`DecodeInputs`).
    "speculation": lambda name: "yes",
    "MLA": lambda name: capabilities(MLA[name].capabilities) if name in MLA else "no",
    "sliding window": of_keys(lambda entry: "yes"),
    "chunks": of_keys(lambda entry: "yes" if entry.chunks else "no"),
    # Vectors in the place of embeddings concern no backend; images whose tokens see each other do.
    "multimodal": of_keys(lambda entry: "yes" if entry.not_causal else "causal"),
}
# SGLang's names, and its marks in these columns: docs_new/docs/advanced_features/attention_backend.mdx, commit 01d8520,
# and what that says nothing of, by the page as of commit 000984e. Speculation is that with one branch (topk 1). Chunks
# (Llama 4's attention) have no column there.
SGLANG = {
    "fa": ("FA3", "yyyyy.y"),
    "fi": ("FlashInfer", "yyyyy.n"),
    "trtllm": ("TRTLLM MHA", "yyyny.n"),
    "triton": ("Triton", "nyyyy.y"),
    "flashmla": ("FlashMLA", "yyyyn.n"),
    "torch": ("Torch Native", "nynnn.y"),
}
NOT_HERE = ("fa4", "flex_attention", "cutlass_mla", "trtllm_mla", "dual_chunk_flash_attn", "aiter", "wave", "ascend")


def table() -> str:
    """Markdown."""
    lines = [f"| | SGLang's name | {' | '.join(COLUMNS)} |", "|" + " --- |" * (2 + len(COLUMNS))]
    for name in BACKENDS:
        theirs, marks = SGLANG[name]
        there = ({"y": " (yes)", "n": " (no)"}.get(mark, "") for mark in marks)
        cells = (f"{cell(name)}{mark}" for cell, mark in zip(COLUMNS.values(), there, strict=True))
        lines.append(f"| `{name}` | {theirs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_registry() -> None:
    inside = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert inside.strip() == table(), "python -m tests.docs.test_attention_features writes it anew"


LATENTS: dict[str, Any] = {"head_dims": (576,), "latents": (512, 64)}
GPUS = (75, 80, 89, 90, 100, 120)


def refused(name: str, capability: int, **model: Any) -> bool:
    """Whether it is, by name."""
    # A backend without prefill kernels here is asked for decode alone.
    has_prefill = name not in MHA or MHA[name].prefill_capability <= capability
    requested = name if has_prefill else f"torch,{name}"
    try:
        needs = AttentionNeeds(compute_capability=capability, **model)
        choose_attention(requested, None, needs, lambda package: None)
    except ConfigError as error:
        return f", but {name} " in str(error)
    return False


@pytest.mark.parametrize("name", BACKENDS)
def test_what_the_table_denies_is_refused_at_start_by_name(name: str) -> None:
    entry, latents = MHA.get(name), MLA.get(name)
    for capability in GPUS:
        if entry is not None:
            assert refused(name, capability, kv_dtype=FP8_E4M3) == (capability not in entry.fp8_capabilities)
        serves = latents is not None and capability in latents.capabilities
        assert refused(name, capability, **LATENTS) != serves
        reads_fp8 = latents is not None and capability in latents.fp8_capabilities
        assert refused(name, capability, kv_dtype=FP8_E4M3, **LATENTS) != (serves and reads_fp8)
        assert refused(name, capability) == (entry is None)
        assert refused(name, capability, scores=Scores(chunks=True)) == (entry is None or not entry.chunks)
        if entry is not None and entry.prefill_capability <= capability:
            assert refused(name, capability, scores=Scores(not_causal=True)) != entry.not_causal


@pytest.mark.parametrize("name", NOT_HERE)
def test_backends_that_only_sglang_has_are_refused_with_what_is_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend is '{name}'; allowed: auto, one of fa fi"):
        choose_attention(name, None, AttentionNeeds(compute_capability=90), lambda package: None)


def test_inputs_that_are_no_text_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match=r"content\[0\].type is 'image_url'; allowed: text"):
        text_of([{"type": "image_url", "image_url": {"url": "data:"}}], "messages[0].content")
    assert TENSORS["video_bytes_input"].refused


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL), encoding="utf-8")
