"""Logits of every architecture against transformers, float32: max|difference| / max|reference| within 1e-4."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import CHECKPOINTS, reference_model, save_checkpoint
from tests.parity.paged import PagedModel

TOLERANCE = 1e-4


class Pair:
    """One checkpoint, in transformers and as a folder for the engine."""

    def __init__(self, name: str, folder: Path) -> None:
        save_checkpoint(name, folder)
        self.folder = folder
        self._reference = reference_model(folder)

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        return self._reference(torch.tensor([tokens])).logits[0].float()

    def check(self, logits: torch.Tensor, tokens: list[int], start: int = 0) -> None:
        """`logits` are those of tokens[start:]."""
        expected = self.expected(tokens)[start:]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


# Those whose layers differ in more than numbers. The others are compared over chunks in every run, and else with
# --full: page sizes, cached prefixes and the last layer's tokens are no family's matter.
WHOLE = ("llama-llama3-tied", "mistral-window", "qwen3_moe", "gemma3", "cohere2", "gpt_oss")
# Those whose queries or kept tokens come about in another way.
DECODED = (*WHOLE, "gemma2", "olmo2", "granite_swa", "hunyuan_v1_dense", "ministral3", "deepseek_v2", "deepseek_v3")


def _families(in_every_run: Sequence[str]) -> pytest.MarkDecorator:
    """All; those that are not in `in_every_run` with --full."""
    marks = {name: () if name in in_every_run else (pytest.mark.full,) for name in sorted(CHECKPOINTS)}
    rows = [pytest.param(name, marks=those) for name, those in marks.items()]
    return pytest.mark.parametrize("pair", rows, indirect=True)


every_family, some_families, decoded_families = _families(tuple(CHECKPOINTS)), _families(WHOLE), _families(DECODED)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("checkpoint"))


def _tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(count)]


@some_families
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_whole_prompts(pair: Pair, page_size: int) -> None:
    paged = PagedModel(pair.folder, page_size=page_size)
    prompts = {0: _tokens(7, 0), 3: _tokens(150, 1), 5: _tokens(64, 2), 6: _tokens(1, 3)}
    for row, logits in paged.step(prompts, {}).items():
        pair.check(logits, prompts[row])


@every_family
def test_chunked_prompts(pair: Pair) -> None:
    paged = PagedModel(pair.folder, page_size=16)
    prompts = {1: _tokens(200, 14), 2: _tokens(90, 15)}
    for begin, end in ((0, 33), (33, 34), (34, 90), (90, 200)):
        chunks = {row: tokens[begin:end] for row, tokens in prompts.items() if begin < len(tokens)}
        for row, logits in paged.step(chunks, {}).items():
            pair.check(logits, prompts[row][:end], begin)


@some_families
def test_only_the_wanted_tokens_leave_the_last_layer(pair: Pair) -> None:
    paged = PagedModel(pair.folder, page_size=16)
    prompts = {1: _tokens(90, 4), 2: _tokens(40, 5), 5: _tokens(1, 6)}
    for row, logits in paged.step(prompts, {}, last_only=True).items():
        pair.check(logits, prompts[row], len(prompts[row]) - 1)
    # The next tokens see the last layer's keys and values of all the others.
    for row, logits in paged.step({2: _tokens(20, 7)}, {1: 7, 5: 8}).items():
        pair.check(logits, paged.tokens[row], len(paged.tokens[row]) - len(logits))


@some_families
def test_cached_prefix(pair: Pair) -> None:
    paged = PagedModel(pair.folder, page_size=16)
    shared = _tokens(70, 6)
    paged.step({0: shared + _tokens(20, 7)}, {})
    paged.share_prefix(0, 4, num_pages=4)
    prompt = shared[:64] + _tokens(50, 8)
    pair.check(paged.step({4: prompt[64:]}, {})[4], prompt, 64)


@decoded_families
def test_decode_beside_prefill(pair: Pair) -> None:
    paged = PagedModel(pair.folder, page_size=16)
    paged.step({0: _tokens(5, 9), 1: _tokens(60, 10), 2: _tokens(170, 11)}, {})
    for i in range(12):
        late = {7: _tokens(40, 12)[i * 8 : i * 8 + 8]} if i < 5 else {}
        rows = [2, 0, 1] + ([7] if i >= 5 else [])
        logits = paged.step(late, {row: _tokens(1, 100 * i + row)[0] for row in rows})
        if i in (0, 4, 11):
            for row in logits:
                pair.check(logits[row], paged.tokens[row], len(paged.tokens[row]) - len(logits[row]))
