"""Images through the real server: chats with data URLs, vllm_backend's `image`, counts and refusals."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from typer.testing import CliRunner

from client import Client
from client.cli import app
from minisgl_backend import LLM
from minisgl_backend.images.segments import SHARED
from tests.docs.blocks import ROOT, blocks
from tests.e2e.image_stack import BASE64, GREEDY, PICTURES, URLS, Stack, messages_of, part_of, running_stack
from tests.images.hostile import CASES
from tests.seeing import encoded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory, served_model_names=("demo",)) as found:
        yield found


def test_images_through_every_door(stack: Stack) -> None:
    options = {"page_size": 4, "num_pages": 400, "encoder_cache_mib": 1, "dtype": "float32"}
    with LLM(str(stack.model.path), **options) as llm:
        (expected,) = llm.chat(messages_of(part_of(URLS[0]), "and", part_of(URLS[1])), **GREEDY)
        prompt = {"prompt": "a<|image_pad|>b", "multi_modal_data": {"image": PICTURES[1]}}
        (raw,) = llm.generate(prompt, **GREEDY)
    body = {"messages": messages_of(part_of(URLS[0]), "and", part_of(URLS[1]))}
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


def _infer(stack: Stack, model: str, **arrays: Any) -> str:
    """The text of an answer by tritonclient; `arrays`: with their batch dimension, where the model has one."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    inputs = []
    for name, array in arrays.items():
        inputs.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{stack.server.grpc}") as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs, outputs=[grpcclient.InferRequestedOutput("text_output")])
        result, error = answers.get(timeout=60)
        client.stop_stream()
    if error is not None:
        raise error
    return str(result.as_numpy("text_output").reshape(-1)[0].decode())


def _texts(*texts: str) -> Any:
    return np.array([text.encode() for text in texts], dtype=np.object_)


def test_images_by_nvidias_names(stack: Stack) -> None:
    """Pixels in both layouts and URLs, with places in the prompt and as a question's images; llmapi's image_url."""
    body = {"messages": messages_of(part_of(URLS[0]), part_of(URLS[1]), "which?"), **GREEDY}
    asked = stack.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    pixels = np.stack([np.asarray(one) for one in PICTURES])[None]
    common = {
        "text_input": _texts("which?")[None],
        "max_tokens": np.array([[6]], dtype=np.int32),
        "temperature": np.array([[0.0]], dtype=np.float32),
        "ignore_eos": np.array([[True]]),
        "exclude_input_in_output": np.array([[True]]),
    }
    sizes = np.array([[[40, 56], [40, 56]]], dtype=np.int64)
    for model in ("ensemble", "tensorrt_llm_bls"):
        for images in (
            {"image_bytes_input": pixels},
            {"image_bytes_input": np.pad(pixels, ((0, 0), (0, 0), (0, 8), (0, 4), (0, 0))), "image_sizes_input": sizes},
            {"image_bytes_input": np.ascontiguousarray(np.moveaxis(pixels, 4, 2))},
            {"image_url_input": _texts(*URLS)[None]},
        ):
            assert _infer(stack, model, **common, **images) == asked, (model, list(images))
    slots = {**common, "text_input": _texts("a<|image_pad|>b<|image_pad|>")[None]}
    status, said = stack.server.generate(
        "ensemble", text_input="a<|image_pad|>b<|image_pad|>", image=BASE64, exclude_input_in_output=True, **GREEDY
    )
    assert (status, said["text_output"]) == (200, _infer(stack, "ensemble", **slots, image_bytes_input=pixels))
    llmapi = {
        "text_input": _texts("which?"),
        "image_url": _texts(*URLS),
        "sampling_param_max_tokens": np.array([6], dtype=np.int32),
        "sampling_param_temperature": np.array([0.0], dtype=np.float32),
    }
    said = _infer(stack, "llmapi", **llmapi, sampling_param_exclude_input_from_output=np.array([True]))
    assert asked.startswith(said)  # which has no ignore_eos
    assert _infer(stack, "llmapi", **llmapi).startswith("which?")
    with pytest.raises(InferenceServerException, match=r"image_url\[0\] is an https URL"):
        _infer(stack, "llmapi", **{**llmapi, "image_url": _texts("https://a.example/b.png")})
    with pytest.raises(InferenceServerException, match="image_input is not served: pixels are prepared here"):
        _infer(stack, "ensemble", **common, image_input=np.ones((1, 1, 3, 8, 8), dtype=np.float16))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (part_of("https://example.org/a.png"), "messages[0].content[0].image_url.url is an https URL"),
        (part_of("data:image/png;base64,AAAA"), "messages[0].content[0].image_url.url is no image that is served"),
        ({"type": "input_audio", "input_audio": {}}, "this server has no audio"),
        ({"type": "image_embeds", "image_embeds": "x"}, "vectors of clients are not taken"),
    ],
)
def test_refusals_are_400_with_thepart_of(stack: Stack, part: dict[str, Any], said: str) -> None:
    answer = stack.post("/v1/chat/completions", {"messages": messages_of(part, "what?"), **GREEDY})
    assert answer["status"] == 400, answer
    assert said in answer["error"]["message"]
    assert answer["error"]["param"] == "messages"


def test_a_places_token_that_is_said_is_text(stack: Stack) -> None:
    """Beside images it is not said, whatever a bias asks; elsewhere it is, and later it takes no image's place. Images
    stand in messages of every role whose parts the template shows."""
    place = stack.model.plain.convert_tokens_to_ids("<|image_pad|>")
    odd = {**GREEDY, "logit_bias": {str(place): 100}, "skip_special_tokens": False}
    beside = stack.post("/v1/chat/completions", {"messages": messages_of(part_of(URLS[0]), "which?"), **odd})
    assert beside["status"] == 200, beside
    assert "<|image_pad|>" not in beside["choices"][0]["message"]["content"]
    said = stack.post("/v1/chat/completions", {"messages": messages_of("which?"), **odd})
    text = said["choices"][0]["message"]["content"]
    assert text == "<|image_pad|>" * 6
    turns = [
        {**messages_of(part_of(URLS[1]), text)[0], "role": role} for role in ("system", "user", "assistant", "tool")
    ]
    again = stack.post("/v1/chat/completions", {"messages": [*turns, *messages_of(text)], **GREEDY})
    assert again["status"] == 200, again
    counted = stack.post("/tokenize", {"messages": [*turns, *messages_of(text)]})["tokens"].count(place)
    assert counted == again["usage"]["prompt_tokens_details"]["image_tokens"]


def test_openais_package(stack: Stack) -> None:
    """Streams, tools' results, and a conversation that goes on by the id of its response."""
    client = stack.endpoint.client()
    more: dict[str, Any] = {"model": "demo", "extra_body": {"ignore_eos": True}}
    messages: Any = messages_of(part_of(URLS[0]), "which?")
    whole = client.chat.completions.create(messages=messages, max_tokens=6, temperature=0, **more)
    stream = client.chat.completions.create(messages=messages, max_tokens=6, temperature=0, stream=True, **more)
    said = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == said
    question: Any = [{"type": "input_image", "image_url": URLS[0]}, {"type": "input_text", "text": "which?"}]
    asked: Any = {"max_output_tokens": 6, "temperature": 0, **more}
    first = client.responses.create(input=[{"role": "user", "content": question}], **asked)
    assert first.output_text == said
    second = client.responses.create(input="and?", previous_response_id=first.id, **asked)
    turns: Any = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    again = client.chat.completions.create(messages=turns, max_tokens=6, temperature=0, **more)
    assert second.output_text == again.choices[0].message.content
    call: Any = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": [question[0]]}
    seen = client.responses.create(input=[{"role": "user", "content": "look"}, call, result], **asked)
    without = client.responses.create(
        input=[{"role": "user", "content": "look"}, call, {**result, "output": "nothing"}], **asked
    )
    assert seen.usage is not None
    assert without.usage is not None
    assert seen.usage.input_tokens > without.usage.input_tokens
    for content, code in (
        ([{"type": "input_image", "image_url": "http://127.0.0.1/a.png"}], "invalid_image_url"),
        ([{"type": "input_image", "image_url": "data:;base64,AAAA"}], "invalid_image_format"),
        ([{"type": "input_image", "file_id": "file-x"}], "image_file_not_found"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(input=[{"role": "user", "content": content}], **asked)  # type: ignore[list-item]
        assert (refused.value.code, refused.value.param) == (code, "input")


def test_anthropics_package(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.endpoint.url, api_key="none", max_retries=0)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64[0]}}
    call: Any = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    messages: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "which?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    ]
    more: dict[str, Any] = {"model": "demo", "messages": messages}
    options: dict[str, Any] = {"max_tokens": 6, "extra_body": {"ignore_eos": True, "temperature": 0}}
    whole = client.messages.create(**more, **options)
    with client.messages.stream(**more, **options) as stream:
        text = "".join(stream.text_stream)
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    counted = client.messages.count_tokens(**more).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    broken: Any = {**image, "source": {**image["source"], "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"source.* is no image that is served"):
        client.messages.create(**{**more, "messages": [{"role": "user", "content": [broken]}]}, **options)


def test_a_benchmark_with_pictures(stack: Stack, tmp_path: Path) -> None:
    counts = []
    for server in (["--url", f"127.0.0.1:{stack.server.grpc}"], ["--openai", stack.endpoint.url]):
        load = [
            "--concurrency",
            "2",
            "--requests",
            "4",
            "--warm-up",
            "1",
            "--input-tokens",
            "20",
            "--output-tokens",
            "4",
        ]
        pictures = ["--image-count", "2", "--image-resolution", "64x48", "--image-format", "png"]
        done = CliRunner().invoke(app, ["bench", *server, *load, *pictures, "--json", str(tmp_path / "out.json")])
        assert done.exit_code == 0, done.output
        written = json.loads((tmp_path / "out.json").read_text())
        assert written["runs"][0]["completed"] == 4, written
        assert written["pictures"]["count"] == 2, written
        counts.append(written["runs"][0]["input_tokens"]["mean"])
    assert counts[0] == pytest.approx(counts[1], abs=10)
    done = CliRunner().invoke(app, ["bench", "--image-count", "1", "--image-resolution", "7"])
    assert done.exit_code == 2
    assert "--image-resolution is '7'; allowed: WIDTHxHEIGHT" in done.output


def test_every_request_of_the_page_about_images(stack: Stack, tmp_path: Path) -> None:
    PICTURES[0].save(tmp_path / "photo.png")
    found = [one.code for one in blocks(ROOT / "docs" / "images.md") if one.language == "bash"]
    assert len(found) > 8
    ports = {":9000/": f":{stack.endpoint.processes.port}/", ":8000/": f":{stack.server.http}/"}
    for code in found[1:]:
        script = f"set -euo pipefail\n{found[0]}\n{code}"
        for named, port in ports.items():
            script = script.replace(named, port)
        environment = {
            **os.environ,
            "MINISGL_URL": f"127.0.0.1:{stack.server.grpc}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        said = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert said.returncode == 0, (code, said.stderr)
        assert said.stdout, code
        if "curl" in code:
            assert "error" not in json.loads(said.stdout) or json.loads(said.stdout)["error"] is None, (
                code,
                said.stdout,
            )


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

        image = threads.submit(ask, "image", {"messages": messages_of(part_of(url), "what?")})
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
        body = {"messages": messages_of(part_of(url), "what?"), **GREEDY}
        return int(stack.post("/v1/chat/completions", body)["status"])

    with ThreadPoolExecutor(12) as threads:
        alone = [gap for gaps in threads.map(lambda k: _gaps(stack, k), range(8)) for gap in gaps]
        streams = [threads.submit(_gaps, stack, 10 + count) for count in range(8)]
        statuses = list(threads.map(ask, urls))
        beside = [gap for stream in streams for gap in stream.result()]
    assert set(statuses) <= {200, 400}, statuses
    assert statuses[0] == 200
    assert max(beside) < 0.5, (max(beside), max(alone))  # seconds
