"""As a new user would: `minisgl serve` with a folder of each of ten families, asked by OpenAI's client and Triton's.

Checkpoints are small and random; the answers are transformers' greedy ones.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
import transformers
import tritonclient.grpc as triton

from benchmarks.served import free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from tests.e2e.conftest import START_SECONDS, STOP_SECONDS
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.decoder_types import save_type

pytestmark = [pytest.mark.e2e, pytest.mark.full]

NATIVE = (
    "llama-llama3-tied", "mistral-window", "qwen3-tied-sharded", "qwen3_moe", "phi3", "gemma3", "gpt_oss",
    "deepseek_v3", "hunyuan_v1_dense", "qwen3_vl",
)  # fmt: skip
THROUGH_TRANSFORMERS = ("gemma4_text",)
PROMPT, COUNT = [3 + 7 * index % 300 for index in range(40)], 12
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_words(folder: Path) -> None:
    """A tokenizer whose tokens are words with spaces between them; a chat is the text of its messages."""
    vocabulary = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=_CHAT)
    fast.save_pretrained(folder)


def text_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@torch.inference_mode()
def greedy(folder: Path) -> list[int]:
    model, tokens = reference_model(folder), list(PROMPT)
    for _ in range(COUNT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[tuple[int, int]]:
    """The ports of gRPC and of OpenAI's API."""
    http, grpc, metrics, health, api = free_ports(5)
    command = [str(Path(sys.executable).with_name("minisgl")), "serve", str(folder), "--dtype", "float32"]
    command += ["--max-seq-len-override", "256", "--num-pages", "64", "--page-size", "16", *options]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("health", health), ("openai", api)):
        command += [f"--{name}-port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        client, deadline = openai.OpenAI(base_url=f"http://127.0.0.1:{api}/v1", api_key="none"), time.monotonic()
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline + START_SECONDS, log.read_text(errors="replace")[-4000:]
            try:
                client.models.list()
                break
            except openai.APIError:
                time.sleep(0.2)
        yield grpc, api
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()


def ask_triton(port: int, text: str, more: Sequence[triton.InferInput] = ()) -> str:
    """The whole answer of a stream from the model `ensemble`, with more inputs."""

    def tensor(name: str, value: Any, kind: str, numpy_type: Any) -> triton.InferInput:
        item = triton.InferInput(name, [1, 1], kind)
        item.set_data_from_numpy(np.array([[value]], dtype=numpy_type))
        return item

    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = [
        tensor("text_input", text.encode(), "BYTES", np.object_),
        tensor("max_tokens", COUNT, "INT32", np.int32),
        tensor("temperature", 0.0, "FP32", np.float32),
        tensor("ignore_eos", True, "BOOL", np.bool_),
        tensor("stream", True, "BOOL", np.bool_),
        *more,
    ]
    pieces = []
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get(timeout=120)
            assert error is None, error
            piece = result.as_numpy("text_output")
            if piece is not None and piece.size:
                pieces.append(piece.flatten()[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return "".join(pieces)


@pytest.mark.parametrize("name", [*NATIVE, *THROUGH_TRANSFORMERS])
def test_a_new_user_is_answered(name: str, tmp_path: Path) -> None:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(f"no tritonserver: {error}")
    folder = tmp_path / "model"
    (save_checkpoint if name in NATIVE else save_type)(name, folder)
    save_words(folder)
    expected = text_of(greedy(folder))
    with served(folder, tmp_path / "log") as (grpc, api):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{api}/v1", api_key="none")
        (model,) = client.models.list().data
        options: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
        question = text_of(PROMPT)
        completion = client.completions.create(model=model.id, prompt=question, **options)
        assert completion.choices[0].text.strip() == expected
        messages: list[Any] = [{"role": "user", "content": question}]
        chat = client.chat.completions.create(model=model.id, messages=messages, **options)
        assert (chat.choices[0].message.content or "").strip() == expected
        assert ask_triton(grpc, question).strip() == expected
