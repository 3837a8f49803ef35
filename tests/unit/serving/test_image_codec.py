"""Requests with images, as Triton's clients and the endpoint send them."""

import base64
import contextlib
import json

import numpy as np
import pytest
from PIL import Image

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.front import ImageFront
from minisgl_backend.images.parts import Source
from minisgl_backend.images.reader import ImageLimits
from minisgl_backend.images.segments import remove_segment
from minisgl_backend.images.store import open_pixels
from minisgl_backend.ipc.wire import Codec
from minisgl_backend.models.config import GenerationDefaults
from minisgl_backend.serving.codec import RequestCodec
from minisgl_backend.serving.prompt_settings import CodecSettings
from tests.seeing import SeeingModel, encoded, picture

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


PIXELS = np.random.default_rng(3).integers(0, 255, (2, 60, 90, 3), dtype=np.uint8)


@pytest.mark.parametrize("first", [False, True])
def test_tensorrtllm_backends_pixels(model, codec, first):
    given = np.moveaxis(PIXELS, 3, 1) if first else PIXELS
    ids, spec = codec.decode({**_tensors(text_input=f"{SLOT}a{SLOT}"), "image_bytes_input": given[None]})
    _check(model, ids, spec)
    files = [base64.b64encode(encoded(Image.fromarray(one))).decode() for one in PIXELS]
    same, others = codec.decode(_tensors(text_input=f"{SLOT}a{SLOT}", image=files))
    assert same.tolist() == ids.tolist()
    _check(model, same, others)


def test_sizes_cut_pixels_from_their_padding(model, codec):
    sizes = np.array([[[60, 90], [30, 60]]], dtype=np.int64)
    tensors = {**_tensors(text_input=f"{SLOT}{SLOT}"), "image_bytes_input": PIXELS[None], "image_sizes_input": sizes}
    ids, spec = codec.decode(tensors)
    pixels = open_pixels(spec.contents[1].pixels, spec.contents[1].shape)
    cut = Image.fromarray(PIXELS[1, :30, :60])
    height, width = spec.contents[1].shape[1:3]
    assert (pixels[0] == np.asarray(cut.resize((width, height), Image.Resampling.BICUBIC))).all()
    _check(model, ids, spec)


@pytest.mark.parametrize("name", ["image_url_input", "image_url"])
def test_questions_behind_urls_go_through_the_template(model, codec, name):
    text = "llmapi_text_input" if name == "image_url" else "text_input"
    ids, spec = codec.decode(_tensors(**{text: "which?", name: URLS}))
    _check(model, ids, spec)
    assert "user" in model.plain.decode(ids[: spec.contents[0].start])
    assert "which?" in model.plain.decode(ids[spec.contents[-1].end :])
    if name == "image_url_input":  # a prompt with places is one already
        ids, spec = codec.decode(_tensors(text_input=f"{SLOT}a{SLOT}", image_url_input=URLS))
        _check(model, ids, spec)
        assert "user" not in model.plain.decode(ids)
        sizes = {"image_sizes_input": np.array([[[60, 90], [120, 50]]], dtype=np.int64)}
        _check(model, *codec.decode({**_tensors(text_input="x", image_url_input=URLS), **sizes}))
        # An id of an image, as tensorrtllm_backend's clients send it, changes nothing.
        extra = {"prompt_table_extra_id": np.array([[7]], dtype=np.uint64)}
        _check(model, *codec.decode({**_tensors(text_input="x", image_url_input=URLS), **extra}))


def test_urls_of_allowed_hosts_are_fetched(model, monkeypatch):
    """By every tensor that has URLs; those of data are no reason to ask anybody."""
    asked = []

    async def fetch_all(_, urls, max_bytes):
        asked.extend(urls)
        assert max_bytes == 64 << 20
        return [WIDE if url.endswith("wide.png") else TALL for _, url in urls]

    monkeypatch.setattr("minisgl_backend.images.fetch.ImageFetcher.fetch_all", fetch_all)
    options = {"num_workers": 1, "media_domains": ["a.example"], "limits": ImageLimits(num_images=2)}
    with contextlib.closing(ImageFront(model.path, model.tokenizer, **options)) as front:
        codec = _codec(model, front)
        web = ["https://a.example/wide.png", URLS[1]]
        for tensors in (
            {"messages": _chat(_url(web[0]), _url(web[1]))},
            {"text_input": "x", "image_url_input": web},
            {"text_input": f"{SLOT}{SLOT}", "image": web},
            {"llmapi_text_input": "x", "image_url": web},
        ):
            _check(model, *codec.decode(_tensors(**tensors)))
        names = ["messages[0].content[0].image_url.url", "image_url_input[0]", "image[0]", "image_url[0]"]
        assert asked == [(name, web[0]) for name in names]
        with pytest.raises(InvalidRequestError, match="is image 3 of 3"):
            codec.decode(_tensors(text_input="x", image_url_input=[web[0]] * 3))
        assert len(asked) == 4


@pytest.mark.parametrize("name", ["image", "image_url", "image_url_input", "image_bytes_input"])
def test_too_many_images_are_refused_before_one_is_looked_at(codec, monkeypatch, name):
    monkeypatch.setattr("minisgl_backend.serving.image_tensors.Source", lambda *_, **__: pytest.fail("looks at one"))
    monkeypatch.setattr("minisgl_backend.images.parts.Source", lambda *_, **__: pytest.fail("looks at one"))
    given = (
        np.ones((1, 30, 4, 4, 3), np.uint8) if name == "image_bytes_input" else np.array([[b"data:,x"] * 30], object)
    )
    with pytest.raises(InvalidRequestError, match=rf"^{name}\[20\] is image 21 of 30; allowed: 20 a request"):
        codec.decode({**_tensors(text_input="x"), name: given, "image_sizes_input": np.ones((1, 7, 2), int)})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"image_bytes_input": np.zeros((1, 1, 4, 4, 4), np.uint8)}, r"image_bytes_input is uint8 \[1, 1, 4, 4, 4\]"),
        ({"image_bytes_input": np.zeros((1, 1, 3, 8, 3), np.uint8)}, "of which one alone has 3"),
        ({"image_bytes_input": np.zeros((2, 1, 4, 4, 3), np.uint8)}, r"\[2, 1, 4, 4, 3\]; allowed: .* width, 3\]"),
        ({"image_bytes_input": PIXELS[None], "image_sizes_input": np.ones((1, 3), int)}, r"int64 \[1, 3\]; allowed"),
        ({"image_url_input": URLS, "image_sizes_input": np.ones((3,), int)}, r"sizes_input is int64 \[3\]; allowed"),
        ({"image_url_input": URLS, "image_sizes_input": np.ones((2, 1, 2), int)}, r"put is int64 \[2, 1, 2\]; allowed"),
        ({"image_url_input": URLS, "image_sizes_input": np.ones((1, 2, 2))}, "image_sizes_input is float64"),
        ({"image_bytes_input": PIXELS[None], "image_sizes_input": np.ones((1, 1, 2), int)}, "has 1 sizes for 2 images"),
        ({"image_bytes_input": PIXELS[None], "image_sizes_input": np.full((1, 2, 2), 61)}, "1 to 60, 1 to 90"),
        ({"image_bytes_input": np.zeros((1, 1, 7100, 7100, 3), np.uint8)}, r"image_bytes_input\[0\] is 7100x7100"),
        ({"image_url_input": URLS, "image_sizes_input": np.full((1, 2, 2), 60)}, r"put\[0\] is 60, 60, and .* 60, 90"),
        ({"image_url_input": URLS, "image_sizes_input": np.full((1, 1, 2), 60)}, "has 1 sizes for 2"),
        ({"image_sizes_input": np.full((1, 1, 2), 60)}, "image_sizes_input is given without images"),
        ({"image_url_input": URLS, "image": URLS}, "image_url_input is given together with image"),
        ({"image_url_input": ["http://a.b/c.png"]}, r"image_url_input\[0\] is an http URL"),
        ({"image_url_input": ["/etc/passwd"]}, r"image_url_input\[0\] is '/etc/passwd'; allowed: a data URL"),
        ({"image_url": ["file:///etc/passwd"]}, r"image_url\[0\] is 'file:///etc/passwd'"),
        ({"image_input": np.ones((1, 1, 3, 8, 8), np.float16)}, "image_input is not served: pixels are prepared here"),
        ({"video_bytes_input": np.ones((1, 1, 3, 8, 8), np.uint8)}, "video_bytes_input is not served: .* no video"),
    ],
)  # fmt: skip
def test_refusals_of_image_tensors(codec, tensors, said):
    arrays = {name: value for name, value in tensors.items() if not isinstance(value, list)}
    texts = {name: value for name, value in tensors.items() if isinstance(value, list)}
    with pytest.raises(InvalidRequestError, match=said):
        codec.decode({**_tensors(text_input=f"{SLOT}{SLOT}", **texts), **arrays})


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
    with pytest.raises(InvalidRequestError, match=r"^image_bytes_input is no text; .*no image encoder"):
        codec.decode({**_tensors(text_input="x"), "image_bytes_input": PIXELS[None]})
    assert len(codec.decode(_tensors(text_input="x", image=[""], image_url_input=[""]))[0])  # sent empty by some


def test_users_texts_stay_texts_without_images_too(model, codec):
    slot = model.plain.convert_tokens_to_ids(SLOT)
    ids, spec = codec.decode(_tensors(messages=json.dumps([{"role": "user", "content": f"what is {SLOT}?"}])))
    assert spec.contents == ()
    assert slot not in ids
    assert SLOT in model.plain.decode(ids)
