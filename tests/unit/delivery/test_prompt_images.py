"""Images as callers of `LLM` give them: measured with the prompt, decoded when the answer begins, gone when it ends."""

import base64
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.prompt_images import PromptImages
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.store import open_pixels
from minisgl_backend.request import NO_SAMPLING, SamplingParams
from minisgl_backend.text.answers import Answer
from minisgl_backend.text.prompts import PromptWithImages, listed
from minisgl_backend.text.vocabulary import empty_vocabulary
from tests.seeing import SeeingModel, encoded, picture

SLOT = "<|image_pad|>"
PIXELS = np.random.default_rng(3).integers(0, 255, (60, 90, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return SeeingModel("qwen2_vl", "bytes", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def images(model):
    config = SimpleNamespace(encoder=object(), why_no_images="")
    with contextlib.closing(
        PromptImages(model.path, config, EngineConfig(encoder_cache_mib=1), lambda: model.tokenizer)
    ) as images:
        yield images


def _pixels(images, seen):
    _, answer = images.of_answer(seen, SamplingParams())
    found = [open_pixels(content.pixels, content.shape) for content in answer.take()]
    answer.remove()
    return found


def _forms(tmp_path):
    png = encoded(PICTURE)
    path = tmp_path / "picture.png"
    path.write_bytes(png)
    return {
        "pillow": PICTURE,
        "array": PIXELS,
        "bytes": png,
        "path": path,
        "path as text": str(path),
        "data url": f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "rgba": PICTURE.convert("RGBA"),
    }


def test_all_forms_are_the_same_image(images, tmp_path):
    found = {}
    for name, given in _forms(tmp_path).items():
        seen = images.of_prompt(f"x {SLOT}", given, None, None)
        (found[name],) = _pixels(images, seen)
    assert all(np.array_equal(pixels, found["array"]) for pixels in found.values())


@pytest.mark.parametrize("form", ["image", "image_pil", "image_url"])
def test_parts_of_messages_have_the_image_itself(model, images, form):
    part = {"type": form, form: {"url": PICTURE} if form == "image_url" else PICTURE}
    content = [{"type": "text", "text": "before "}, part, {"type": "text", "text": " after"}]
    seen = images.of_chat([{"role": "user", "content": content}], {}, None)
    assert len(_pixels(images, seen)) == 1
    text = model.plain.decode(seen.token_ids)
    assert text.index("before") < text.index(SLOT) < text.index("after")


def test_texts_alone_cost_nothing(images):
    assert images.of_chat([{"role": "user", "content": "hello"}], {}, None) is None


def test_grey_turned_and_deep_images(images):
    grey = PIXELS[:, :, 0]
    for given in (grey, grey[:, :, None], Image.fromarray(grey)):
        (pixels,) = _pixels(images, images.of_prompt(SLOT, given, None, None))
        assert (pixels[..., 0] == pixels[..., 1]).all()
    turned = PICTURE.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6
    assert images.of_prompt(SLOT, turned, None, None).seen.images[0].size.grid == (1, 4, 6)
    deep = Image.fromarray((np.arange(6400, dtype=np.uint16) * 10).reshape(80, 80))
    (pixels,) = _pixels(images, images.of_prompt(SLOT, deep, None, None))
    assert pixels.min() == 0
    assert 200 < pixels.max() < 255


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, r"multi_modal_data.image\[0\] is a int; allowed: an image of Pillow"),
        ([PICTURE, None], r"image\[1\] is a NoneType"),
        (PIXELS.astype(np.float32), "array of float32"),
        (PIXELS[:, :, :2], r"uint8 \[60, 90, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), r"\[0, 4, 3\]"),
        ("/no/such/file.png", "cannot be read: No such file"),
        (b"", "is empty"),
        (b"abc", "is no image"),
        (Image.new("F", (30, 30)), "floating-point"),
        ("data:image/png;base64,!", "no base64"),
    ],
)
def test_refusals(images, given, said):
    with pytest.raises(InvalidRequestError, match=said):
        images.of_prompt(SLOT, given, None, None)


def test_a_model_without_eyes(model):
    blind = PromptImages(
        model.path, SimpleNamespace(encoder=None, why_no_images="it is a test"), EngineConfig(), lambda: None
    )
    with pytest.raises(InvalidRequestError, match=r"no image encoder \(it is a test\)"):
        blind.of_prompt(SLOT, PICTURE, None, None)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] is no text"):
        blind.of_chat([{"role": "user", "content": [{"type": "image", "image": PICTURE}]}], {}, None)


def test_pixels_live_from_the_answers_begin_to_its_last_streams_end(images):
    seen = images.of_prompt(SLOT, PICTURE, None, None)
    params = SamplingParams(n=2)
    answer = Answer(7, seen.token_ids, params, empty_vocabulary(), False, images.of_answer(seen, params)[1])
    assert answer.request.contents == ()
    (content,) = answer.begin().contents
    answer.note_end()
    assert open_pixels(content.pixels, content.shape).shape == content.shape
    answer.note_end()
    with pytest.raises(FileNotFoundError):
        open_pixels(content.pixels, content.shape)
    answer.end()
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        images.of_answer(seen, SamplingParams(prompt_logprobs=0))
    assert NO_SAMPLING.prompt_logprobs is None


def test_prompts_in_vllms_format():
    options = {"max_pixels": 50_000}
    (found,) = listed({"prompt": "x", "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": options})
    assert found == PromptWithImages("x", PICTURE, options, None)
    uuids = {"multi_modal_uuids": {"image": ["a"]}, "multi_modal_data": {"image": [PICTURE], "video": None}}
    (found,) = listed([{"prompt_token_ids": [1, 2], **uuids}])
    assert found == PromptWithImages([1, 2], [PICTURE], None, ["a"])
    assert listed({"prompt": "x", "multi_modal_data": {}}) == ["x"]
    for data, said in (({"video": [1]}, "'video'; allowed: image"), ([PICTURE], "an object with `image`")):
        with pytest.raises(InvalidRequestError, match=said):
            listed({"prompt": "x", "multi_modal_data": data})


def test_uuids_are_for_each_image(images):
    digests = [
        images.of_prompt(SLOT, [PICTURE], None, uuids).seen.images[0].digest for uuids in (None, ["a"], ["b"], ["b"])
    ]
    assert len(set(digests)) == 3
    with pytest.raises(InvalidRequestError, match="1 images and 2 uuids"):
        images.of_prompt(SLOT, [PICTURE], None, ["a", "b"])
    assert picture(3, 3)
