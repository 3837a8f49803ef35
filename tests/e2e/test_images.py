"""Images through the real server: chats with data URLs, vllm_backend's `image`, counts and refusals."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from client import Client
from minisgl_backend import LLM
from minisgl_backend.images.segments import SHARED
from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import running_endpoint
from tests.images.hostile import CASES
from tests.seeing import SeeingModel, encoded
from tests.seeing_checkpoint import seeing_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 56, 3), dtype=np.uint8)) for seed in (1, 2)
]
BASE64 = [base64.b64encode(encoded(one)).decode() for one in PICTURES]
URLS = [f"data:image/png;base64,{one}" for one in BASE64]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Stack:
    """The model, and the addresses of its server and endpoint."""

    def __init__(self, model: SeeingModel, server: Any, endpoint: Any) -> None:
        self.model, self.server, self.endpoint = model, server, endpoint

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.endpoint.post(path, body)
        return {**answer, "status": status}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = seeing_checkpoint(tmp_path_factory.mktemp("model"))
    parameters = {"model": str(model.path), "page_size": "4", "num_pages": "400", "encoder_cache_mib": "1"}
    with (
        RunningServer(tmp_path_factory.mktemp("server"), parameters) as server,
        running_endpoint(server, workers=1, files_folder=str(tmp_path_factory.mktemp("files"))) as endpoint,
    ):
        yield Stack(model, server, endpoint)


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _messages(*parts: Any) -> list[dict[str, Any]]:
    listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": listed}]


def test_images_through_every_door(stack: Stack) -> None:
    options = {"page_size": 4, "num_pages": 400, "encoder_cache_mib": 1, "dtype": "float32"}
    with LLM(str(stack.model.path), **options) as llm:
        (expected,) = llm.chat(_messages(_part(URLS[0]), "and", _part(URLS[1])), **GREEDY)
        prompt = {"prompt": "a<|image_pad|>b", "multi_modal_data": {"image": PICTURES[1]}}
        (raw,) = llm.generate(prompt, **GREEDY)
    body = {"messages": _messages(_part(URLS[0]), "and", _part(URLS[1]))}
    answer = stack.post("/v1/chat/completions", {**body, **GREEDY})
    assert answer["status"] == 200, answer
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert 0 < answer["usage"]["prompt_tokens_details"]["image_tokens"] < len(expected.prompt_token_ids)
    image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": one}} for one in BASE64]
    blocks = {"messages": [{"role": "user", "content": [image[0], {"type": "text", "text": "and"}, image[1]]}]}
    answer = stack.post("/v1/messages", {**blocks, **GREEDY})
    assert answer["content"][0]["text"] == expected.text, answer
    counted = stack.post("/v1/messages/count_tokens", blocks)
    assert counted["input_tokens"] == len(expected.prompt_token_ids), counted
    parts = [{"type": "input_image", "image_url": url} for url in URLS]
    item = {"role": "user", "content": [parts[0], {"type": "input_text", "text": "and"}, parts[1]]}
    limited = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
    answer = stack.post("/v1/responses", {"input": [item], **limited})
    assert answer["output"][0]["content"][0]["text"] == expected.text, answer
    files = stack.endpoint.client().files
    ids = [files.create(file=("a.png", encoded(one)), purpose="vision").id for one in PICTURES]
    parts = [{"type": "input_image", "file_id": one} for one in ids]
    item = {"role": "user", "content": [parts[0], {"type": "input_text", "text": "and"}, parts[1]]}
    answer = stack.post("/v1/responses", {"input": [item], **limited})
    assert answer["output"][0]["content"][0]["text"] == expected.text, answer
    counted = stack.post("/tokenize", body)
    assert counted["tokens"] == expected.prompt_token_ids
    one = {"text_input": "a<|image_pad|>b", "image": [BASE64[1]], "exclude_input_in_output": True, **GREEDY}
    status, said = stack.server.generate("vllm_model", **one)
    assert (status, said.get("text_output")) == (200, raw.text), said
    two = {"text_input": "a<|image_pad|>b<|image_pad|>", "image": BASE64, **GREEDY}
    for name in ("vllm_model", "ensemble"):
        status, said = stack.server.generate(name, **two)
        assert status == 200, (name, said)
    with Client(f"127.0.0.1:{stack.server.grpc}", timeout=60) as client:
        asked = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
        assert client.generate("a<|image_pad|>b", images=[encoded(PICTURES[1])], **asked).text == raw.text
        assert client.generate(messages=body["messages"], **asked).text == expected.text
    left = [path.name for folder in SHARED.glob("minisgl-images-*") for path in folder.iterdir()]
    assert not [name for name in left if name.startswith("lent-")]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (_part("https://example.org/a.png"), "messages[0].content[0].image_url.url is an https URL"),
        (_part("data:image/png;base64,AAAA"), "messages[0].content[0].image_url.url is no image that is served"),
        ({"type": "input_audio", "input_audio": {}}, "this server has no audio"),
        ({"type": "image_embeds", "image_embeds": "x"}, "vectors of clients are not taken"),
    ],
)
def test_refusals_are_400_with_the_part(stack: Stack, part: dict[str, Any], said: str) -> None:
    answer = stack.post("/v1/chat/completions", {"messages": _messages(part, "what?"), **GREEDY})
    assert answer["status"] == 400, answer
    assert said in answer["error"]["message"]
    assert answer["error"]["param"] == "messages"


def test_texts_do_not_wait_for_images(stack: Stack) -> None:
    """A large picture takes a second of a worker; texts that come meanwhile are answered first."""
    large = Image.effect_noise((6000, 6000), 90).convert("RGB")
    url = f"data:image/png;base64,{base64.b64encode(encoded(large, compress_level=1)).decode()}"
    if len(url) > 60 << 20:
        url = f"data:image/jpeg;base64,{base64.b64encode(encoded(large, 'JPEG', quality=60)).decode()}"
    with ThreadPoolExecutor(4) as threads:
        ended: dict[str, float] = {}

        def ask(name: str, body: dict[str, Any]) -> None:
            answer = stack.post("/v1/chat/completions", {**body, **GREEDY})
            assert answer["status"] == 200, answer
            ended[name] = time.monotonic()

        image = threads.submit(ask, "image", {"messages": _messages(_part(url), "what?")})
        time.sleep(0.3)
        text = threads.submit(ask, "text", {"messages": [{"role": "user", "content": "hello"}]})
        image.result()
        text.result()
    assert ended["text"] < ended["image"]


def _gaps(stack: Stack, count: int) -> list[float]:
    """Seconds between what a stream brings, of a text's answer."""
    stamps = []
    with Client(f"127.0.0.1:{stack.server.grpc}", timeout=120) as client:
        asked: dict[str, Any] = {"temperature": 1.0, "seed": count, "max_tokens": 150, "ignore_eos": True}
        for _ in client.stream(f"world {count}", **asked):
            stamps.append(time.monotonic())
    return [later - before for before, later in itertools.pairwise(stamps)]


@pytest.mark.full
def test_streams_go_on_beside_images_and_what_is_none(stack: Stack) -> None:
    """Every hostile file, pictures of a phone's size, and new small ones, while eight texts are streamed."""
    photo = encoded(Image.effect_noise((4032, 3024), 90).convert("RGB"), "JPEG", quality=60)
    files = [
        photo,
        *(case.make() for case in CASES.values() if not case.full),
        *(encoded(PICTURES[0].rotate(turn)) for turn in range(20)),
    ]
    urls = [f"data:image/jpeg;base64,{base64.b64encode(one).decode()}" for one in files if len(one) < 16 << 20]

    def ask(url: str) -> int:
        body = {"messages": _messages(_part(url), "what?"), **GREEDY}
        return int(stack.post("/v1/chat/completions", body)["status"])

    with ThreadPoolExecutor(12) as threads:
        alone = [gap for gaps in threads.map(lambda k: _gaps(stack, k), range(8)) for gap in gaps]
        streams = [threads.submit(_gaps, stack, 10 + count) for count in range(8)]
        statuses = list(threads.map(ask, urls))
        beside = [gap for stream in streams for gap in stream.result()]
    assert set(statuses) <= {200, 400}, statuses
    assert statuses[0] == 200
    assert max(beside) < 0.5, (max(beside), max(alone))  # seconds
