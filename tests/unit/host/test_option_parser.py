"""Unknown options and their explanations, and options from a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.foreign_options import FOREIGN_OPTIONS, ForeignOption, explain_unknown
from minisgl_backend.host.new_repository import init_parser
from minisgl_backend.host.options.server import open_ports_warning, parse_arguments, server_parser
from minisgl_backend.llm import LLM

ROOT = Path(__file__).resolve().parents[3]
OURS = server_parser("minisgl serve").option_names()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--modle", "no such option: --modle; did you mean --model?"),
        ("--max-running-request", "no such option: --max-running-request; did you mean --max-running-requests?"),
        ("--page_size=3", "no such option: --page_size; did you mean --page-size?"),
        ("--max-model-len", "--max-model-len is vLLM's; here --max-seq-len-override"),
        (
            "--gpu-memory-utilization=0.9",
            "--gpu-memory-utilization is vLLM's; here --memory-ratio: of the memory that is free, not of all",
        ),
        ("--tensor-parallel-size", "--tensor-parallel-size is vLLM's and SGLang's and Mini-SGLang's; here --tp"),
        ("--mem-fraction-static", "--mem-fraction-static is SGLang's; here --memory-ratio: of the memory that is free"),
        ("--max_batch_size", "--max_batch_size is TensorRT-LLM's; here --max-running-requests"),
        ("--enable-lora", "--enable-lora is vLLM's and SGLang's; here there is none: on with --adapters"),
        ("--max-num-seqq", "no such option: --max-num-seqq; --max-num-seqs is vLLM's; here --max-running-requests"),
        ("--xyz", "no such option: --xyz; --help lists all"),
        (
            "--ctx-size=4096",
            "--ctx-size is llama.cpp's; here --max-seq-len-override: of each request, not of all together",
        ),
        ("--ctx-sise", "no such option: --ctx-sise; --ctx-size is llama.cpp's; here --max-seq-len-override: of each"),
        ("--gpu-layer", "no such option: --gpu-layer; --gpu-layers is llama.cpp's; here there is none: all layers"),
        ("-ngl", "-ngl is llama.cpp's; here there is none: all layers are on the GPU"),
        ("-np", "-np is llama.cpp's; here --max-running-requests"),
        ("-fa", "-fa is llama.cpp's; here --attn"),
        ("--num_ctx", "--num_ctx is Ollama's; here --max-seq-len-override"),
        ("--OLLAMA_HOST", "--OLLAMA_HOST is Ollama's; here --host and --openai-port"),
        # Another option's end alone is no likeness.
        ("--cache-size", "no such option: --cache-size; --help lists all"),
        ("--vocab-size", "no such option: --vocab-size; --help lists all"),
        ("--ngl", "no such option: --ngl; -ngl is llama.cpp's; here there is none: all layers"),
        ("--model-dir", "no such option: --model-dir; did you mean --model?"),
        ("--pool-size", "no such option: --pool-size; --help lists all"),
    ],
)
def test_an_unknown_option_is_explained(given: str, said: str) -> None:
    found = explain_unknown(given, OURS)
    assert found.startswith(said) if "; " in said or said[0] == "-" else found == said


@pytest.mark.parametrize(("server", "rows"), FOREIGN_OPTIONS.items())
def test_every_option_of_a_server_is_answered_by_its_row(server: str, rows: tuple[ForeignOption, ...]) -> None:
    """Where several servers have a name, the options beside it tell which one's is meant."""
    (own,) = (
        flag
        for flag in ("--max-model-len", "--mem-fraction-static", "--max_num_tokens", "--graph", "-ngl", "num_gpu")
        if any(flag in row.flags for row in rows)
    )
    for row in rows:
        for flag in row.flags:
            if flag not in OURS and flag.replace("_", "-") not in OURS:
                said = explain_unknown(flag, OURS, [own])
                assert said.endswith(f"; here {row.hint}"), said
                assert f"{server}'s" in said


def test_the_options_beside_a_mistyped_one_tell_whose_it_is() -> None:
    assert explain_unknown("--tp-siz", OURS, ["--tp_size"]).startswith("no such option: --tp-siz; --tp")
    assert "TensorRT-LLM's" in explain_unknown("--max-num-token", OURS, ["--max_batch_size", "--tp_size"])
    assert "llama.cpp's" in explain_unknown("--thread", OURS, ["-ngl"])


@pytest.mark.parametrize(
    "arguments", [["-hf", "owner/name"], ["model", "-c", "4096"], ["-m", "x.gguf"], ["-t", "4"], ["--jinja"], ["-v"]]
)
def test_options_of_one_letter_are_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2
    assert "is llama.cpp's; here" in capsys.readouterr().err


def test_arguments_of_python_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"n_ctx is llama\.cpp's; here max_seq_len_override"):
        LLM("demo", n_ctx=4096, n_gpu_layers=-1)
    with pytest.raises(ConfigError, match=r"num_ctx is Ollama's; here max_seq_len_override"):
        LLM("demo", num_ctx=4096)


@pytest.mark.parametrize("arguments", [["--modle", "x"], ["folder", "--modle", "x"], ["--modle=x"]])
def test_serve_explains(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2
    assert "no such option: --modle; did you mean --model?" in capsys.readouterr().err


def test_a_wrong_option_is_told_before_a_missing_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        init_parser().parse_args(["model", "--ot", "folder", "--max-num-seqs", "3"])
    assert "no such option: --ot; did you mean --out?" in capsys.readouterr().err


CONFIG = """# a server
model: demo
page_size: 16
http-port: 8100
served-model-name: [one, two]
verbose: true
"""


def test_a_file_of_options(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(CONFIG)
    found = parse_arguments(["--config", str(file), "--http-port", "8000"])
    assert found.engine_parameters == {"model": "demo", "page_size": "16"}
    assert found.server.http_port == 8000  # the command line comes first, its default's value too
    assert found.server.verbose
    assert found.endpoint is not None
    assert found.endpoint.served_model_names == ("one", "two")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = parse_arguments([str(tmp_path / "model"), "--config", str(file)])
    assert found.engine_parameters["model"] == str(tmp_path / "model")
    file.write_text("speculative-config: {method: ngram, num_speculative_tokens: 4}\n")
    parameters = parse_arguments(["--config", str(file)]).engine_parameters
    assert parameters == {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}
    file.write_text("# nothing\n")
    assert parse_arguments(["--config", str(file)]).engine_parameters == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pagesize: 3", "7: no such option: --pagesize; did you mean --page-size?"),
        ("max_model_len: 100", "7: --max_model_len is vLLM's; here --max-seq-len-override"),
        ("num-pages: -1", "7: num_pages is -1; allowed: "),
        ("grpc-port: 99999", "7: --grpc-port: '99999'; allowed: 1 to 65535"),
        ("tp: [1, 2]", "7: tp has 2 values; allowed: one"),
        ("tp: {a: b}", "7: allowed: a value, or a list of values"),
        ("verbose: maybe", "7: verbose is there twice"),
        ("config: other.yaml", "7: config is for the command line"),
        ("- a list", "expected"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(CONFIG + line + "\n")
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--config", str(file)])
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def test_a_file_is_left_alone_until_yaml_is_installed(tmp_path: Path) -> None:
    """The script asks before anything is installed; without site-packages there is no PyYAML."""
    file = tmp_path / "server.yaml"
    file.write_text("pagesize: 3\n")
    command = [sys.executable, "-S", "-m", "minisgl_backend.host.options.server", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([command[0], *command[2:]], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "did you mean --page-size?" in done.stderr) == (2, True)


def test_ports_that_the_key_does_not_guard_are_told() -> None:
    assert open_ports_warning(parse_arguments([])) is None
    warning = open_ports_warning(parse_arguments(["--api-key", "k", "--host", "0.0.0.0"]))
    assert warning is not None
    assert "the API key guards port 9000 alone: ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics)" in warning
    assert "answer all who reach 0.0.0.0" in warning
    warning = open_ports_warning(parse_arguments(["--host", "0.0.0.0"]))
    assert warning is not None
    assert warning.startswith("no API key is set: ports 8000 (HTTP)")
    assert "9000 (OpenAI's and Anthropic's APIs) answer all who reach 0.0.0.0" in warning
    assert open_ports_warning(parse_arguments(["--host", "::1"])) is None
