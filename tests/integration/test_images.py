"""Images from the caller's hand to the answer, which is that of transformers' own model with the same pixels."""

import base64

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from minisgl_backend import LLM
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.segments import SHARED
from tests.parity.seeing import Image, reference
from tests.seeing import encoded
from tests.seeing_checkpoint import NAME, seeing_checkpoint

SIZE = (40, 56)  # height and width that need no resizing
OPTIONS = {"dtype": "float32", "page_size": 4, "num_pages": 400, "max_running_requests": 4, "encoder_cache_mib": 1}


def _picture(seed):
    return Picture.fromarray(np.random.default_rng(seed).integers(0, 255, (*SIZE, 3), dtype=np.uint8))


FIRST, SECOND = _picture(1), _picture(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return seeing_checkpoint(tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model.path), **OPTIONS) as llm:
        yield llm


def _expected(model, output, *pictures):
    """What transformers says of the prompt, whose images' places are those of its placeholders."""
    slot = model.plain.convert_tokens_to_ids("<|image_pad|>")
    ids = iter(output.prompt_token_ids)
    images = iter(pictures)
    prompt, left = [], 0
    for token in ids:
        if token != slot:
            left = 0
            prompt.append(token)
        elif not left:
            prompt.append(Image(torch.from_numpy(np.array(next(images)))[None]))
            left = 1
    assert next(images, None) is None
    return reference(NAME, model.model, prompt).tokens


def _question(*parts):
    kinds = ["text" if isinstance(part, str) else "image" for part in parts]
    return [{"role": "user", "content": [{"type": kind, kind: part} for kind, part in zip(kinds, parts, strict=True)]}]


def test_chats_about_images(model, llm):
    greedy = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    both, swapped, text = llm.chat(
        [_question(FIRST, "and", SECOND), _question(SECOND, "and", FIRST), _question("hello")], **greedy
    )
    assert both.token_ids == _expected(model, both, FIRST, SECOND)
    assert swapped.token_ids == _expected(model, swapped, SECOND, FIRST)
    assert text.token_ids == _expected(model, text)
    url = f"data:image/png;base64,{base64.b64encode(encoded(FIRST)).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    content = [part, *_question("and", SECOND)[0]["content"]]
    (same,) = llm.chat([{"role": "user", "content": content}], **greedy)
    assert same.prompt_token_ids == both.prompt_token_ids
    assert same.token_ids == both.token_ids
    assert same.num_cached_tokens > 0


def test_vllms_prompts(model, llm):
    greedy = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    prompt = {"prompt": "see <|image_pad|> here", "multi_modal_data": {"image": FIRST}}
    (answer,) = llm.generate(prompt, **greedy)
    assert answer.token_ids == _expected(model, answer, FIRST)
    ids = {"prompt_token_ids": answer.prompt_token_ids, "multi_modal_data": {"image": [FIRST]}}
    (again,) = llm.generate(ids, **greedy)
    assert again.token_ids == answer.token_ids
    assert [token for piece in llm.stream(prompt, **greedy) for token in piece.token_ids] == answer.token_ids


def test_what_stands_for_images_is_never_said(model, llm):
    """Of an answer about one; a text's answer may, since its steps are those of a model of texts."""
    names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    wanted = {model.plain.convert_tokens_to_ids(name): 90 for name in names}
    for options in ({"temperature": 0}, {"temperature": 1, "seed": 3, "repetition_penalty": 1.2, "bad_words": ["a"]}):
        values = {"max_tokens": 6, "ignore_eos": True, "logit_bias": wanted, **options}
        seen, text = llm.chat([_question(FIRST, "what?"), _question("what?")], **values)
        assert set(seen.token_ids).isdisjoint(wanted)
        assert set(text.token_ids) <= set(wanted)


def test_nothing_stays_behind(model, llm):
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\].image is no image"):
        llm.chat(_question(b"abc", "what?"))
    llm.chat(_question(FIRST), max_tokens=2, n=2)
    left = [path.name for folder in SHARED.glob("minisgl-images-*") for path in folder.iterdir()]
    assert not [name for name in left if name.startswith("lent-")]


def test_without_memory_for_vectors_it_reads_text_alone(model):
    with LLM(str(model.path), **{**OPTIONS, "encoder_cache_mib": 0}) as blind:
        assert blind.chat(_question("hello"), max_tokens=2)[0].token_ids
        with pytest.raises(InvalidRequestError, match="no image encoder"):
            blind.chat(_question(FIRST))
