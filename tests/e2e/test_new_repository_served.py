"""A repository that `minisgl init` wrote, served by a tritonserver without the supervisor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from client import Client
from tests.e2e.conftest import ROOT, RunningServer
from tests.e2e.wire import Server, batched

pytestmark = pytest.mark.e2e

MODEL = ROOT / "model_repository" / "engine" / "demo_model"


def test_a_bare_server_serves_what_init_wrote(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    shutil.copytree(MODEL, model)

    def init(repository: Path) -> None:
        shutil.rmtree(repository)
        options = ["--model", str(model), "--max-seq-len-override", "48", "--infer", "--out", str(repository)]
        subprocess.run([sys.executable, "-m", "client", "init", *options], check=True, cwd=ROOT)

    # Without options, as a container's command line starts it.
    bare = RunningServer(tmp_path, {}, prepare=init, options=())
    with bare as server, Client(f"127.0.0.1:{server.grpc}") as client:
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        assert client.generate(messages=question, temperature=0).text == "17 + 25 = 42."
        answer = client.generate(messages=[{"role": "user", "content": "Count from 1 to 200."}], temperature=0)
        assert answer.num_input_tokens + answer.num_output_tokens == 48, "the option is in force"
        assert_infer_works(server)
        assert_llmapi_works(server)


def assert_llmapi_works(server: Server) -> None:
    """The tensors of TensorRT-LLM's LLM API: NVIDIA's own client, unmodified, and `generate`."""

    def client(*options: object) -> str:
        script = ROOT / "tests" / "third_party" / "tensorrtllm_backend" / "llmapi_client.py"
        command = [sys.executable, script, "-u", f"127.0.0.1:{server.grpc}", "--model-name", "llmapi_infer", *options]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def asked_of(question: str) -> str:  # this API makes no chat of it
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

    question = asked_of("What is 17 + 25?")
    assert f"Output text: {question}17 + 25 = 42." in client("--text", question)
    assert "Got completed request" in client("--text", question, "--stop-after-ms", 1, "--request-id", 7)
    asked = {
        "text_input": asked_of("Count from 1 to 20."),
        "sampling_param_max_tokens": 30,
        "sampling_param_temperature": 0.0,
        "sampling_param_stop": [", 7"],
        "sampling_param_exclude_input_from_output": True,
        "sampling_param_return_perf_metrics": True,
        "return_finish_reason": True,
        "return_stop_reason": True,
    }
    status, answer = server.generate("llmapi", **asked)
    assert status == 200, answer
    told = {name: answer[name] for name in ("text_output", "finish_reason", "stop_reason")}
    assert told == {"text_output": "1, 2, 3, 4, 5, 6", "finish_reason": "stop", "stop_reason": ", 7"}
    assert answer["kv_cache_reused_block"] + answer["kv_cache_missed_block"] == answer["kv_cache_alloc_total_blocks"]
    assert 0 < answer["arrival_time_ns"] <= answer["first_token_time_ns"] <= answer["last_token_time_ns"]
    for field, message in (
        ("lora_name", "lora_name is 'x', which is not served; allowed: none, as adapters are off"),
        ("image_url", "image_url is no text; allowed: text, as this model has no image encoder"),
    ):
        status, answer = server.generate("llmapi", text_input="x", **{field: "x"})
        assert status == 400, answer
        assert message in str(answer)
    status, answer = server.generate("llmapi", text_input="x", sampling_param_max_tokens=0)
    assert "sampling_param_max_tokens is 0; allowed: 1 or more" in str(answer)


def assert_infer_works(server: Server) -> None:
    """Triton's plain `infer` over both of its protocols, many requests at once, and errors."""
    sums = [(number, 2 * number + 1) for number in range(16)]
    with (
        triton_http.InferenceServerClient(f"127.0.0.1:{server.http}", concurrency=len(sums)) as http,
        triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as grpc,
    ):
        assert not grpc.get_model_config("infer").config.model_transaction_policy.decoupled

        def inputs(kind: Any, question: str = "What is 17 + 25?", **values: Any) -> list[Any]:
            messages = json.dumps([{"role": "user", "content": question}])
            given = {"messages": messages, "temperature": 0.0, "max_tokens": 20, **values}
            tensors = []
            for tensor in batched(**given):
                array = np.array(tensor.value, triton_to_np_dtype(tensor.dtype))
                tensors.append(kind.InferInput(tensor.name, list(array.shape), tensor.dtype))
                # Over HTTP as JSON, so as people write it by hand; the answer comes in binary.
                tensors[-1].set_data_from_numpy(array, **({"binary_data": False} if kind is triton_http else {}))
            return tensors

        outputs = [triton_http.InferRequestedOutput(name) for name in ("text_output", "finish_reason")]
        answer = http.infer("infer", inputs(triton_http, return_finish_reason=True), outputs=outputs)
        assert answer.as_numpy("text_output").ravel().tolist() == [b"17 + 25 = 42."]
        assert answer.as_numpy("finish_reason").ravel().tolist() == [b"stop"]
        waiting = [http.async_infer("infer", inputs(triton_http, f"What is {one} + {other}?")) for one, other in sums]
        for (one, other), answer in zip(sums, waiting, strict=True):
            text = answer.get_result().as_numpy("text_output").ravel()[0].decode()
            assert text == f"{one} + {other} = {one + other}."
        answer = grpc.infer("infer", inputs(triton_grpc, num_return_sequences=2))
        assert answer.as_numpy("text_output").ravel().tolist() == [b"17 + 25 = 42."] * 2
        for kind, client in ((triton_http, http), (triton_grpc, grpc)):
            with pytest.raises(InferenceServerException, match="max_tokens is 0"):
                client.infer("infer", inputs(kind, max_tokens=0))
        assert server.generate("infer", text_input="hello", stream=True)[0] == 400
