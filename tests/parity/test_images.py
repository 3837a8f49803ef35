"""Answers about images: as transformers' models give them, whole as in chunks, cached, beside others, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from minisgl_backend.request import FinishReason
from minisgl_backend.runner.graphs.image_inputs import ImageInputs
from tests.parity.checkpoints import save_tokenizer
from tests.parity.seeing import Image, Said, reference, seeing, tokens_of
from tests.parity.vision_checkpoints import FAMILIES, TOWERS, pixels, save

MORE = pytest.mark.full
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "gemma3", "llava_next", "glm4v")
OTHERS = tuple(name for name in TOWERS if name not in NAMES)  # the engine's part of which is LLaVA-NeXT's


class Case(NamedTuple):
    """A checkpoint, a prompt with two images, one with them swapped, and what transformers says."""

    name: str
    folder: Path
    prompt: list[int | Image]
    swapped: list[int | Image]
    said: Said
    said_swapped: Said
    said_text: Said


TEXT: list[int | Image] = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module", params=[*NAMES, *(pytest.param(name, marks=MORE) for name in OTHERS)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def make_case(name: str, folder: Path) -> Case:
    model = save(name, folder)
    save_tokenizer(folder)
    sizes = FAMILIES[name].sizes
    # Of images of several sizes transformers' Pixtral pads some, and tiles have to be as many.
    is_same = name in ("mistral3", "gemma3", "llava_of_pixtral") or FAMILIES[name].tiled
    first, second = Image(pixels(*sizes[0])), Image(pixels(*sizes[0 if is_same else 1], seed=3))
    prompt: list[int | Image] = [5, 6, 7, first, 8, 9, second, 10, 11]
    swapped: list[int | Image] = [5, 6, 7, second, 8, 9, first, 10, 11]
    said, said_swapped, said_text = (reference(name, model, one) for one in (prompt, swapped, TEXT))
    return Case(name, folder, prompt, swapped, said, said_swapped, said_text)


def assert_same(found: Said, expected: Said) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_answers_are_those_of_transformers(case: Case) -> None:
    """Whole, from the prefix cache, with other images in the same places, and beside others."""
    with seeing(case.name, case.folder) as engine:
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        assert_same(engine.ask(engine.request(case.swapped))[0], case.said_swapped)
        assert case.said.logprobs != case.said_swapped.logprobs
        requests = [engine.request(one) for one in (TEXT, case.swapped, [3, *case.prompt], case.prompt)]
        text, swapped, _, prompt = engine.ask(*requests)
        assert_same(text, case.said_text)
        assert_same(swapped, case.said_swapped)
        assert_same(prompt, case.said)
        books = engine.books
        assert (books.misses, books.evictions) == (2, 0), "an image is encoded once"
        stats = engine.core._scheduler.stats()
        in_prompt = sum(one.length for one in engine.request(case.prompt).contents)
        assert stats.total_image_tokens == 6 * in_prompt
        assert (stats.total_encoder_misses, stats.encoder_used_bytes) == (2, engine.held_bytes)


@pytest.mark.parametrize("name", [*OTHERS, "qwen3_5"])
def test_answers_of_others_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    with seeing(name, tmp_path, max_prefill_length=5) as engine:
        for _ in range(2):
            assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        text, swapped = engine.ask(engine.request(TEXT), engine.request(case.swapped))
        assert_same(text, case.said_text)
        assert_same(swapped, case.said_swapped)


@pytest.mark.parametrize("length", [1, 3, 7, pytest.param(2, marks=MORE), pytest.param(11, marks=MORE)])
def test_chunks_end_anywhere(case: Case, length: int) -> None:
    """With a layer of the encoder a step; every border in and around an image is a chunk's of one token."""
    if length == 1 and case.name not in ("qwen2_5_vl", "qwen3_vl"):
        pytest.skip("one family with each kind of rotation is enough")
    with seeing(case.name, case.folder, max_prefill_length=length) as engine:
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "gemma4", "mistral3", "qwen3_5"])
def test_captured_passes_have_places_for_images(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, whole and in chunks, beside rows that decode, and of text behind those of images."""
    case, sizes = make_case(name, tmp_path), []
    fill = ImageInputs.fill
    monkeypatch.setattr(ImageInputs, "fill", lambda self, tokens, size: (sizes.append(size), fill(self, tokens, size)))
    for options in ({}, {"max_prefill_length": 16, "page_size": 8}):
        environment = {"MINISGL_EAGER_GRAPHS": "1"}
        with seeing(name, tmp_path, environment, cuda_graph_max_tokens=128, cuda_graph_max_bs=4, **options) as engine:
            assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
            requests = [engine.request(one) for one in (TEXT, case.swapped, [3, *case.prompt], TEXT)]
            text, swapped, _, again = engine.ask(*requests)
            assert_same(text, case.said_text)
            assert_same(again, case.said_text)
            assert_same(swapped, case.said_swapped)
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=MORE), pytest.param(4, marks=MORE)])
def test_chunks_beside_states_end_anywhere(length: int, tmp_path: Path) -> None:
    """At every place in and around an image, where pages have so many tokens: chunks end with pages there."""
    case = make_case("qwen3_5", tmp_path)
    with seeing("qwen3_5", tmp_path, page_size=length, num_pages=800, max_prefill_length=length) as engine:
        for _ in range(2):
            assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        assert_same(engine.ask(engine.request(case.swapped))[0], case.said_swapped)


def test_a_cached_prefix_ends_inside_of_an_image(case: Case) -> None:
    """Its vectors are held, or made again; pages of one token end at every place."""
    image = case.prompt[3]
    assert isinstance(image, Image)
    with seeing(case.name, case.folder, page_size=1, num_pages=800) as engine:
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        for inside in (1, tokens_of(case.name, image) - 1):
            engine.forget_pages_from(case.prompt, 3 + inside)
            assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
            engine.forget_pages_from(case.prompt, 3 + inside)
            for key in list(engine.books._entries):
                engine.books.drop(key)
            assert_same(engine.ask(engine.request(case.prompt))[0], case.said)


def test_several_answers_and_aborts(case: Case) -> None:
    with seeing(case.name, case.folder) as engine:
        requests = [engine.request(case.prompt, n=3), engine.request(case.swapped)]
        *three, swapped = engine.ask(*requests)
        for said in three:
            assert_same(said, case.said)
        assert_same(swapped, case.said_swapped)
        aborted = engine.request([9, *case.swapped])
        engine.core.submit(aborted)
        engine.core.step()
        engine.core.abort([aborted.uid], FinishReason.CANCELLED)
        assert_same(engine.ask(engine.request(case.prompt))[0], case.said)
        assert not any(entry.owners for entry in engine.books._entries.values())
        assert engine.books.used == engine.held_bytes


def test_rows_that_are_preempted_go_on(case: Case) -> None:
    """Pages for two and a half sequences: while some are computed others lose theirs."""
    with seeing(case.name, case.folder, num_pages=45, max_seq_len_override=128) as engine:
        prompts = [case.prompt, case.swapped, [4, *case.prompt[1:]]]
        requests = [engine.request(one, max_tokens=30) for one in prompts]
        found = engine.ask(*requests)
        with seeing(case.name, case.folder) as alone:
            for said, prompt in zip(found, prompts, strict=True):
                expected = alone.ask(alone.request(prompt, max_tokens=30))[0]
                assert_same(said, expected)


def test_pixels_that_are_gone_end_their_request_alone(case: Case) -> None:
    with seeing(case.name, case.folder) as engine:
        other = Image(pixels(*FAMILIES[case.name].sizes[0], seed=7))
        lost, kept = engine.request([1, other, 2]), engine.request(case.prompt)
        engine.remove_pixels(lost)
        engine.core.submit(lost)
        assert_same(engine.ask(kept)[0], case.said)
        assert engine.errors.keys() == {lost.uid}
        assert "No such file" in engine.errors[lost.uid]
        assert len(engine.ask(engine.request([1, other, 2]))[0].tokens) == 5
        assert_same(engine.ask(engine.request(case.swapped))[0], case.said_swapped)


@pytest.mark.parametrize("name", ["qwen2_5_vl"])
def test_prompt_lookup_drafts_beside_images(name: str, tmp_path: Path) -> None:
    """The prompt has its texts twice, so that there is something to look up; drafts end before placeholders."""
    model = save(name, tmp_path)
    save_tokenizer(tmp_path)
    first = Image(pixels(*FAMILIES[name].sizes[1]))
    prompt: list[int | Image] = [5, 6, first, 8, 9, 5, 6, first, 8, 9, 5, 6]
    expected = reference(name, model, prompt, 12)
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    with seeing(name, tmp_path, speculative_config=config) as engine:
        for _ in range(2):
            assert_same(engine.ask(engine.request(prompt, max_tokens=12))[0], expected)


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_text_in_the_row_of_an_image(name: str, tmp_path: Path) -> None:
    """The rotation is at true positions again, also where a prompt's pass is captured whole."""
    model = save(name, tmp_path)
    save_tokenizer(tmp_path)
    prompt: list[int | Image] = [5, Image(pixels(*FAMILIES[name].sizes[0])), 8, 9, 10, 11, 12, 13]
    said, said_text = (reference(name, model, one) for one in (prompt, TEXT))
    graphs = {"MINISGL_EAGER_GRAPHS": "1"}
    with seeing(name, tmp_path, graphs, max_running_requests=1, cuda_graph_max_tokens=64) as engine:
        for wanted, asked in ((said, prompt), (said_text, TEXT), (said, prompt)):
            assert_same(engine.ask(engine.request(asked))[0], wanted)
        # With the image in the prefix cache, what follows it goes in captured pieces, too.
        pieces = engine.core._runner._pieces  # type: ignore[attr-defined]
        assert pieces is not None
        with mock.patch.object(pieces, "run", wraps=pieces.run) as run:
            assert_same(engine.ask(engine.request(prompt))[0], said)
        assert run.call_count == 1
