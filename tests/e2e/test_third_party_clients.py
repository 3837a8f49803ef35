"""Other people's clients, unmodified, as their users run them: each a process of its own against the real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.text.tokenizer import Tokenizer
from tests.e2e.conftest import ROOT, RunningServer
from tests.e2e.wire import PATIENCE_SECONDS, Server, Tensor

pytestmark = pytest.mark.e2e

THIRD_PARTY = ROOT / "tests" / "third_party"
TENSORRT_LLM = THIRD_PARTY / "tensorrtllm_backend"
VLLM = THIRD_PARTY / "vllm_backend"
DEMO = ROOT / "model_repository" / "engine" / "demo_model"

QUESTION = "What is 17 + 25?"
COUNT = "Count from 1 to 60."


def run(*command: object, python: str = sys.executable, seconds: float = PATIENCE_SECONDS, **environment: str) -> str:
    """What the command writes; it has to end well."""
    done = subprocess.run(
        [python, *map(str, command)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


# ---- TensorRT-LLM's end_to_end_grpc_client.py, on `ensemble` and `tensorrt_llm_bls`


def end_to_end(server: Server, prompt: str, *options: object) -> str:
    output = run(TENSORRT_LLM / "end_to_end_grpc_client.py", "-u", f"127.0.0.1:{server.grpc}", "-p", prompt, *options)
    assert "Received an error" not in output, output
    return output


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("options", [(), ("-S",), ("--exclude-input-in-output",)])
def test_end_to_end_client_gets_the_answer(server: Server, model: str, options: tuple[str, ...]) -> None:
    """The client itself compares: whole answers begin with the prompt, unless it asks for them without."""
    questions = [QUESTION, "What is 2 + 3?"]
    expected = [server.text(text_input=question, max_tokens=32) for question in questions]
    checks = ("--check-outputs", "--expected-outputs", json.dumps(expected), "--model-name", model, "-o", 32)
    output = end_to_end(server, json.dumps(questions), *options, *checks)
    assert "42" in output if not options else True


@pytest.mark.parametrize("whole", [False, True])
def test_end_to_end_client_gets_each_of_several_sequences(server: Server, whole: bool) -> None:
    """A response for each sequence. Whole answers come so on tensorrt_llm_bls: `ensemble` sends one with all texts."""
    expected = server.text(text_input=COUNT, max_tokens=12)
    checks = ("--check-outputs", "--expected-outputs", json.dumps([expected]), "-n", 2, "-o", 12)
    if whole:
        output = end_to_end(server, json.dumps([COUNT]), *checks, "--model-name", "tensorrt_llm_bls")
        assert [f"0 [{index}]: {COUNT}{expected}" in output for index in (0, 1)] == [True, True]
    else:
        end_to_end(server, json.dumps([COUNT]), *checks, "-S")


@pytest.mark.parametrize("options", [(), ("-S",)])
def test_end_to_end_client_gets_the_figures_of_its_request(server: Server, options: tuple[str, ...]) -> None:
    """It reads all of them in every response."""
    output = end_to_end(server, QUESTION, "-o", 8, "--return-perf-metrics", *options)
    found = [(name, int(value)) for name, value in re.findall(r"^(\w+_ns|kv_cache\w+): (\d+)$", output, re.MULTILINE)]
    assert len(found) % 7 == 0
    assert len(found) > 7 if options else len(found) == 7
    for start in range(0, len(found), 7):
        figures = dict(found[start : start + 7])
        names = ("arrival", "first_scheduled", "first_token", "last_token")
        times = [figures[f"{name}_time_ns"] for name in names]
        assert 0 < times[0] <= times[1] <= times[2] <= times[3], figures
        new, reused = figures["kv_cache_alloc_new_blocks"], figures["kv_cache_reused_blocks"]
        assert new + reused == figures["kv_cache_alloc_total_blocks"] > 0


def test_end_to_end_client_gets_log_probabilities(server: Server) -> None:
    output = end_to_end(server, QUESTION, "-o", 8, "--return-log-probs")
    assert "output_log_probs.shape: (1, 1, 8)" in output


def test_end_to_end_client_stops_and_avoids_words(server: Server) -> None:
    whole = server.text(text_input=COUNT, max_tokens=64)
    stop = ", 7"
    plain = ("-o", 64, "--exclude-input-in-output")
    assert f"0: {whole[: whole.index(stop)]}\n" in end_to_end(server, COUNT, *plain, "--stop-words", stop, "nothing")
    assert "7" not in end_to_end(server, COUNT, *plain, "--bad-words", "7", " 7")
    comma = Tokenizer(DEMO).encode(",", add_special_tokens=False)
    assert len(comma) == 1
    assert f"0: {whole}\n" in end_to_end(server, COUNT, *plain, "--end-id", 2, "--pad-id", 0)


def test_end_to_end_client_gets_json(server: Server) -> None:
    pytest.importorskip("xgrammar")
    output = end_to_end(server, "Tell me", "-o", 20, "-S", "--guided-decoding-guide-type", "json")
    assert output.splitlines()[-1].startswith(("{", "["))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-b", 2), "beam_width is 2; allowed: 1"),
        (("--embedding-bias-words", "a", "--embedding-bias-weights", "1"), "embedding_bias_w"),
        (("--lora-task-id", "3"), "lora_task_id is not served: name an adapter of the server by lora_name"),
        (("--return-context-logits",), "context_logits"),
    ],
)
def test_end_to_end_client_hears_what_is_not_served(server: Server, options: tuple[object, ...], message: str) -> None:
    command = (TENSORRT_LLM / "end_to_end_grpc_client.py", "-u", f"127.0.0.1:{server.grpc}", "-p", QUESTION)
    # tritonserver 2.51 may leave a call open behind its error, and this client waits for its end.
    for seconds in (8.0, 30.0, 30.0):  # it takes two where nothing else runs
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert message in run(*command, *options, seconds=seconds)
            return
    pytest.fail("the client was never told")


# ---- TensorRT-LLM's inflight_batcher_llm_client.py, on `tensorrt_llm`: token ids in, token ids out


def token_ids(question: str) -> list[int]:
    tokenizer = Tokenizer(DEMO)
    rendered = tokenizer.render([{"role": "user", "content": question}])
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def inflight(server: Server, folder: Path, question: str, *options: object) -> str:
    prompt = folder / "prompt.csv"
    prompt.write_text(",".join(map(str, token_ids(question))) + "\n", encoding="utf-8")
    client = TENSORRT_LLM / "inflight_batcher_llm_client.py"
    return run(client, "-u", f"127.0.0.1:{server.grpc}", "--input-tokens-csv", prompt, "--end-id", 2, *options)


def answer_ids(server: Server, question: str, max_tokens: int) -> list[int]:
    """From `tensorrt_llm` as well, and the same text as from `ensemble`."""
    ids = token_ids(question)
    tensors = [
        Tensor("input_ids", "INT32", [ids]),
        Tensor("input_lengths", "INT32", [[len(ids)]]),
        Tensor("request_output_len", "INT32", [[max_tokens]]),
        Tensor("streaming", "BOOL", [[True]]),
    ]
    chunks = list(server.stream(tensors, model="tensorrt_llm"))
    assert all(chunk.shapes["output_ids"][:2] == (1, 1) for chunk in chunks)
    assert [chunk.outputs["sequence_length"][0] for chunk in chunks] == [
        len(chunk.outputs["output_ids"]) for chunk in chunks
    ]
    found = [token for chunk in chunks for token in chunk.outputs["output_ids"]]
    assert Tokenizer(DEMO).decode(found).removesuffix("<|im_end|>") == server.text(
        text_input=question, max_tokens=max_tokens
    )
    return found


@pytest.mark.parametrize(
    "options",
    [
        ("-S",),
        ("-n", 1),
        ("-n", 1, "--exclude-input-in-output"),
        pytest.param(("-S", "-n", 1), marks=pytest.mark.full),
    ],
)
def test_inflight_client_gets_the_token_ids(server: Server, tmp_path: Path, options: tuple[object, ...]) -> None:
    """The client itself compares. Whole answers need `-n`, which makes it use a gRPC stream, as a decoupled model
    wants it; they begin with the prompt's tokens, unless it asks for them without."""
    expected = answer_ids(server, COUNT, 40)
    if "--exclude-input-in-output" not in options:
        expected = token_ids(COUNT) + expected
    (tmp_path / "expected.csv").write_text(",".join(map(str, expected)) + "\n", encoding="utf-8")
    checks = ("--request-output-len", 40, "-c", "--output-tokens-csv", tmp_path / "expected.csv")
    assert "PASS!" in inflight(server, tmp_path, COUNT, *options, *checks)


def test_inflight_client_gets_several_sequences_and_all_that_it_can_ask_for(server: Server, tmp_path: Path) -> None:
    asked = ("--request-output-len", 16, "-n", 2, "--return-log-probs", "--return-perf-metrics")
    output = inflight(server, tmp_path, COUNT, *asked, "--temperature", 0.5, "--repetition-penalty", 1.0)
    assert output.count("Output sequence: ") == 2
    assert "cum_log_probs:" in output
    assert re.search(r"^first_scheduled_time_ns: \d{19}$", output, re.MULTILINE)


def test_inflight_client_with_a_tokenizer_and_named_outputs(server: Server) -> None:
    output = run(
        TENSORRT_LLM / "inflight_batcher_llm_client.py", "-u", f"127.0.0.1:{server.grpc}", "--tokenizer-dir", DEMO,
        "--text", "Count from 1", "-S", "--requested-outputs", "output_ids", "sequence_length",
    )  # fmt: skip
    assert "Output beam 0: " in output


@pytest.mark.parametrize(
    ("options", "cancels"),
    # Without -S a cancelled stream is noticed by its next response only, and that is the last one.
    [(("-S",), False), (("-n", 1), False), (("-S",), True)],
)
def test_inflight_client_stops_its_request(
    null_server: Server, tmp_path: Path, options: tuple[object, ...], cancels: bool
) -> None:
    """By a second request with `stop` and the same id, after which the first one ends with what it has; or by
    cancelling the gRPC stream."""
    how = ("--stop-via-request-cancel",) if cancels else ("--request-id", "17")
    # 15 s long where nobody stops it.
    asked = ("--request-output-len", 3000, "--stop-after-ms", 1000, *options, *how)
    output = inflight(null_server, tmp_path, COUNT, *asked, "--end-id", -1)
    assert ("Request is cancelled" in output) == cancels
    null_server.wait_for(lambda found: found["minisgl_requests_running"] == 0)


# ---- vllm_backend's sample client and its own tests, on `vllm_model`


@pytest.mark.parametrize("options", [(), ("-s",), ("--exclude-inputs-in-outputs", "--iterations", 3)])
def test_vllm_sample_client(server: Server, tmp_path: Path, options: tuple[object, ...]) -> None:
    prompts, results = tmp_path / "prompts.txt", tmp_path / "results.txt"
    prompts.write_text(f"{QUESTION}\n{COUNT}\n", encoding="utf-8")
    files = ("--input-prompts", prompts, "--results-file", results)
    output = run(VLLM / "client.py", "-u", f"127.0.0.1:{server.grpc}", *files, *options)
    assert "PASS: vLLM example" in output
    answers = results.read_text(encoding="utf-8").split("\n=========\n\n")[:-1]
    assert len(answers) == (6 if "--iterations" in options else 2)
    assert all("42" in answer for answer in answers[::2])
    assert answers[0].startswith(QUESTION) == (not options)


def test_vllm_sample_client_hears_that_there_are_no_adapters(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(QUESTION, encoding="utf-8")
    files = ("--input-prompts", prompts, "--results-file", tmp_path / "results.txt")
    output = run(VLLM / "client.py", "-u", f"127.0.0.1:{server.grpc}", *files, "-l", "mine")
    assert "lora_name is 'mine', which is not served; allowed: none, as adapters are off" in output


@pytest.fixture(scope="module")
def vllm_opt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What vllm_backend's tests expect of a server: a model `vllm_opt` that goes on until its limit, and answers that
    begin with the prompt.

    The demo model ends its sentences; a copy without the tokens that do so cannot. It is surer of some tokens than a
    float can say, and the tests want each of them to change the sum of the log-probabilities: the copy doubts more.
    """
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(DEMO, folder / "model")
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(folder / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][:3] = 0
    weights["model.norm.weight"] *= 0.5
    safetensors.save_file(weights, folder / "model" / "model.safetensors")

    def prepare(repository: Path) -> None:
        shutil.copytree(repository / "vllm_model", repository / "vllm_opt")
        alias = repository / "vllm_opt" / "config.pbtxt"
        alias.write_text(alias.read_text().replace('name: "vllm_model"', 'name: "vllm_opt"'), encoding="utf-8")
        tokenizer = repository / "tokenizer" / "config.pbtxt"
        text = tokenizer.read_text(encoding="utf-8")
        for key in ("apply_chat_template", "exclude_input_in_output"):
            text = re.sub(f'(key: "{key}" value: {{ string_value: )"\\w+"', r'\1"false"', text)
        tokenizer.write_text(text, encoding="utf-8")

    parameters = {"model": str(folder / "model"), "max_seq_len_override": "34"}
    with RunningServer(folder, parameters, prepare=prepare) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "every", "chosen"),
    [
        # Every 47th of 1,458: all pairs of values come.
        ("additional_outputs", 47, ""),
        # The others want OPT-125m's words, and an error for stream with exclude_input_in_output=false: docs/client.md.
        ("enabled_stream", 1, "enabled_stream and not exclude_input"),
    ],
)
def test_vllm_backends_own_tests(vllm_opt: Server, tmp_path: Path, name: str, every: int, chosen: str) -> None:
    common, here = tmp_path / "common", tmp_path / "ci" / name
    common.mkdir()
    here.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "e2e" / "vllm_ci" / "test_util.py", common)
    shutil.copy(VLLM / name / f"{name}_test.py", here)
    environment = {"VLLM_CI_GRPC_PORT": str(vllm_opt.grpc), "VLLM_CI_EVERY": str(every), "PYTHONPATH": str(common)}
    output = run(
        "-m", "pytest", "-q", "-x", "-c", os.devnull, "--rootdir", here, "-p", "test_util", "-p", "no:cacheprovider",
        *(("-k", chosen) if chosen else ()), here / f"{name}_test.py", **environment,
    )  # fmt: skip
    assert re.search(r"^[1-9]\d* passed", output.splitlines()[-1]), output


# ---- LlamaIndex, on `ensemble`


def test_llama_index(server: Server, frameworks_python: str) -> None:
    program = f"""
from llama_index.llms.nvidia_triton import NvidiaTriton
llm = NvidiaTriton(server_url="127.0.0.1:{server.grpc}", model_name="ensemble", tokens=64)
print("complete:", llm.complete("{QUESTION}").text)
pieces = [piece.delta or "" for piece in llm.stream_complete("{QUESTION}")]
print("stream:", "".join(pieces), len(pieces) > 3)
"""
    output = run("-c", program, python=frameworks_python)
    expected = server.text(text_input=QUESTION, max_tokens=64)
    assert f"complete: {expected}\n" in output
    assert f"stream: {expected} True\n" in output
