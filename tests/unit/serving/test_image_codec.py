"""Requests with images, as Triton's clients and the endpoint send them."""

import base64
import contextlib
import json

import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.front import ImageFront
from minisgl_backend.images.parts import Source
from minisgl_backend.images.segments import remove_segment
from minisgl_backend.images.store import open_pixels
from minisgl_backend.ipc.wire import Codec
from minisgl_backend.models.config import GenerationDefaults
from minisgl_backend.serving.codec import RequestCodec
from minisgl_backend.serving.prompt_settings import CodecSettings
from tests.seeing import SeeingModel, picture

SLOT = "<|image_pad|>"
WIDE, TALL = picture(90, 60), picture(50, 120)
URLS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (WIDE, TALL)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return SeeingModel("qwen2_vl", "bytes", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def front(model):
    with contextlib.closing(ImageFront(model.path, model.tokenizer, num_workers=1)) as front:
        yield front


def _codec(model, images, **settings):
    values = {"max_seq_len": 1000, "vocab_size": len(model.plain), "eos_token_ids": ()}
    return RequestCodec(
        model.tokenizer,
        CodecSettings(generation=GenerationDefaults(), **{**values, **settings}),
        images=images,
    )


@pytest.fixture(scope="module")
def codec(model, front):
    return _codec(model, front)


def _tensors(**values):
    texts = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return {
        name: np.array([[one if isinstance(one, bytes) else one.encode() for one in value]], dtype=object)
        for name, value in texts.items()
    }


def _chat(*parts):
    return json.dumps([{"role": "user", "content": list(parts)}])


def _url(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def _check(model, ids, spec, files=(WIDE, TALL)):
    vector = model.plain.convert_tokens_to_ids(SLOT)
    assert len(spec.contents) == len(files)
    for content in spec.contents:
        assert (ids[content.start : content.end] == vector).all()
        assert content.length == content.grid[1] * content.grid[2] // 4
        pixels = open_pixels(content.pixels, content.shape)
        assert pixels.shape == content.shape
        remove_segment(content.pixels)
    assert (ids == vector).sum() == sum(content.length for content in spec.contents)
    assert Codec().spec(Codec().pack(spec)) == spec


def test_messages_with_data_urls(model, codec):
    text = {"type": "text", "text": "and"}
    ids, spec = codec.decode(_tensors(messages=_chat(_url(URLS[0]), text, _url(URLS[1]))))
    _check(model, ids, spec)
    first, second = spec.contents
    assert first.grid[1:] == (4, 6)
    assert second.grid[2] < second.grid[1]
    decoded = model.plain.decode(ids[first.end : second.start])
    assert decoded.replace("<|vision_end|>", "").replace("<|vision_start|>", "") == "and"


def test_the_endpoints_messages_have_their_files_beside_them(model, codec):
    sources = [Source(f"messages[0].content[{k}]", data) for k, data in enumerate((WIDE, TALL))]
    parts = [{"type": "text", "text": "x"}, sources[0].part(0), {"type": "text", "text": "y"}, sources[1].part(1)]
    ids, spec = codec.decode(_tensors(messages=_chat(*parts), image_data=[WIDE, TALL]))
    _check(model, ids, spec)
    same, others = codec.decode(
        _tensors(messages=_chat({"type": "text", "text": "x"}, _url(URLS[0]), parts[2], _url(URLS[1])))
    )
    assert same.tolist() == ids.tolist()
    assert [one.digest for one in others.contents] == [one.digest for one in spec.contents]
    _check(model, same, others)
    for data, counts in (([WIDE], "1 images"), ([WIDE, TALL, WIDE], "3 images")):
        with pytest.raises(InvalidRequestError, match=counts):
            codec.decode(_tensors(messages=_chat(*parts), image_data=data))


@pytest.mark.parametrize("as_url", [False, True])
def test_vllm_backends_image(model, codec, as_url):
    images = URLS if as_url else [url.partition(",")[2] for url in URLS]
    ids, spec = codec.decode(_tensors(vllm_text_input=f"a {SLOT} b {SLOT} c", image=images))
    _check(model, ids, spec)
    with pytest.raises(InvalidRequestError, match=r"text_input has 0 places for 2 images.*image_pad"):
        codec.decode(_tensors(text_input="a b", image=images))
    tensors = {**_tensors(text_input="which?", image=images), "apply_chat_template": np.array([[True]])}
    ids, spec = codec.decode(tensors)
    _check(model, ids, spec)
    assert "which?" in model.plain.decode(ids[spec.contents[-1].end :])


def test_token_ids_with_images(model, codec):
    slot = model.plain.convert_tokens_to_ids(SLOT)
    tensors = {**_tensors(image=URLS), "prompt_token_ids": np.array([[5, slot, 6, slot, 7]], dtype=np.int32)}
    ids, spec = codec.decode(tensors)
    _check(model, ids, spec)
    assert ids[0] == 5
    assert ids[-1] == 7


def test_counting_decodes_nothing(codec, monkeypatch):
    monkeypatch.setattr(ImageFront, "contents", lambda *_: pytest.fail("decodes"))
    ids, spec = codec.decode(_tensors(messages=_chat(_url(URLS[0]))), only_counts=True)
    assert spec.contents == ()
    assert len(ids) > 6


def test_options_change_pixels_and_digests(model, codec):
    large = f"data:;base64,{base64.b64encode(picture(800, 700)).decode()}"
    found = {}
    for name, part, extra in (
        ("plain", _url(large), {}),
        ("auto", _url(large, detail="auto"), {}),
        ("low", _url(large, detail="low"), {}),
        ("pixels", _url(large), {"mm_processor_kwargs": {"max_pixels": 50_000}}),
        ("more", _url(large), {"mm_processor_kwargs": {"max_pixels": 10**8}}),
        ("background", _url(large), {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}),
        ("uuid", {**_url(large), "uuid": "mine"}, {}),
    ):
        values = {name: json.dumps(value) for name, value in extra.items()}
        tensors = {**_tensors(messages=_chat(part)), **_tensors(sampling_parameters=json.dumps(extra))}
        _, spec = codec.decode(tensors)
        assert values is not None
        (found[name],) = spec.contents
        remove_segment(found[name].pixels)
    digests = {name: content.digest for name, content in found.items()}
    assert digests["plain"] == digests["auto"] == digests["more"]
    assert len({digests[name] for name in ("plain", "pixels", "background", "uuid")}) == 4
    assert found["pixels"].length < found["plain"].length


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"messages": _chat(_url("http://a.b/c.png"))}, r"messages\[0\].content\[0\].image_url.url is an http URL"),
        ({"messages": _chat(_url("data:image/png;base64,AAAA"))}, r"content\[0\].image_url.url is no image that is"),
        ({"messages": _chat({"type": "video_url", "video_url": {"url": URLS[0]}})}, "no video"),
        ({"messages": _chat({"type": "foo"})}, "has type 'foo'"),
        ({"messages": _chat(_url(URLS[0])), "image": URLS[0]}, "image is given together"),
        ({"text_input": SLOT, "image": "!!"}, r"image\[0\] is no base64"),
        ({"text_input": SLOT, "image": "file:///etc/passwd"}, r"image\[0\] is no base64"),
        ({"image": URLS[0]}, "text_input is missing"),
        ({"messages": _chat(_url(URLS[0])), "sampling_parameters": '{"prompt_logprobs": 1}'}, "prompt_logprobs"),
        (
            {"messages": _chat(_url(URLS[0])), "sampling_parameters": '{"mm_processor_kwargs": {"num_crops": 3}}'},
            "'num_crops'; allowed: min_pixels",
        ),
    ],
)
def test_refusals(codec, tensors, said):
    with pytest.raises(InvalidRequestError, match=said):
        codec.decode(_tensors(**tensors))


def test_a_prompt_that_is_too_long_is_told_by_parts(model, front):
    codec = _codec(model, front, max_seq_len=60)
    big = f"data:;base64,{base64.b64encode(picture(300, 300)).decode()}"
    with pytest.raises(InvalidRequestError, match=r"\d+ of text, 121 of images; `detail: low`.*prompt is too long"):
        codec.decode(_tensors(messages=_chat(_url(big))))


@pytest.mark.parametrize("escape", [False, True])
def test_a_model_without_eyes_refuses_by_part(model, escape):
    codec = _codec(model, None, why_no_images="its encoder is not computed")
    text = _chat({"type": "text", "text": "x"}, _url(URLS[0]))
    for tensors in (
        _tensors(messages=text.replace("image", "\\u0069mage") if escape else text),
        _tensors(messages=_chat({"type": "image", "index": 0}), image_data=[WIDE]),
        _tensors(text_input=SLOT, image=URLS[0]),
    ):
        with pytest.raises(InvalidRequestError, match=r"no image encoder \(its encoder is not computed\)"):
            codec.decode(tensors)


def test_users_texts_stay_texts_without_images_too(model, codec):
    slot = model.plain.convert_tokens_to_ids(SLOT)
    ids, spec = codec.decode(_tensors(messages=json.dumps([{"role": "user", "content": f"what is {SLOT}?"}])))
    assert spec.contents == ()
    assert slot not in ids
    assert SLOT in model.plain.decode(ids)
