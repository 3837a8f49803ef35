"""`python -m minisgl_backend`."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from minisgl_backend import __version__
from minisgl_backend.__main__ import PANELS, app
from minisgl_backend.config import OPTIONS, EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.model_check import check_folder
from minisgl_backend.host.repository import render_repository

DEMO = Path(__file__).parents[2] / "model_repository" / "engine" / "demo_model"
HEADS = "tp is 3; allowed: a divisor of the model's num_attention_heads, which is 8"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─┃┏┓┗┛━]", " ", text))


def test_every_option_is_on_every_page() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(OPTIONS)
    for page in (("--help",), ("generate", "--help"), ("check", "--help")):
        text = plain(run(*page).output)
        for option in OPTIONS.values():
            assert bool(re.search(rf"{option.flags[0]}(?![\w-])", text)) != option.internal, (page, option.name)
    table = plain(run("options").output)
    assert all((name[:8] in table) != option.internal for name, option in OPTIONS.items() if name != "runner")


def test_check_resolves_without_loading() -> None:
    result = run("check", "--page-size", "32", "--attn", "torch")
    assert result.exit_code == 0
    assert "Qwen3ForCausalLM" in result.output
    assert "page_size 32" in plain(result.output)


def test_check_tells_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plain(run("check", "--attn", "torch", "--num-pages", "100", "--page-size", "16").output)
    assert re.search(r"weights \d+ MiB", text)
    assert re.search(r"free memory [\d.]+ GiB", text)
    assert "KV pages about 100 of 16 tokens: room for" in text
    monkeypatch.setattr("minisgl_backend.runner.start.memory.free_bytes", lambda device: 5 << 20)
    result = run("check", "--dtype", "float32")
    assert result.exit_code == 2
    assert re.search(r"whose weights need \d+ MiB of memory; 5 MiB are free", result.stderr)


def test_check_tells_what_a_draft_model_takes() -> None:
    method = '{"method": "draft_model", "model": "demo"}'
    text = plain(run("check", "--attn", "torch", "--speculative-config", method).output)
    assert re.search(r"draft model Qwen3ForCausalLM: \d+ MiB of these weights, 50% of each KV page", text)


def test_check_reads_the_options_of_a_repository(tmp_path: Path) -> None:
    render_repository(DEMO.parents[1], tmp_path, {"page_size": "32", "tp": "3"})
    result = run("check", "--repository", str(tmp_path))
    assert (result.exit_code, result.stderr) == (2, f"error: {HEADS}\n")
    result = run("check", "--repository", str(DEMO.parents[1]))
    assert result.exit_code == 0


def test_check_finds_weights_that_are_cut_off(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("check", "--model", str(tmp_path / "model"))
    assert result.exit_code == 2
    assert "model.safetensors cannot be read" in result.stderr
    assert run("check", "--model", str(tmp_path / "model"), "--dummy-weights").exit_code == 0


def test_check_takes_the_servers_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: demo\nattn: torch\npage-size: 32\nnum-pages: 100\nhttp-port: 9999\n")
    text = plain(run("check", "--config", str(file), "--num-pages", "200").output)
    assert "page_size 32" in text
    assert "KV pages about 200 of 32 tokens" in text, "what is given here comes before it"
    (tmp_path / "own").mkdir()
    render_repository(DEMO.parents[1], tmp_path / "own", {"page_size": "64"})
    file.write_text(f"repository: {tmp_path / 'own'}\nattn: torch\n")
    assert "page_size 64" in plain(run("check", "--config", str(file)).output)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page-size: 3", "f.yaml:1: page_size is 3; allowed: a power of two"),
        ("http-port: x", "f.yaml:1: --http-port: 'x'; allowed: 1 to 65535"),
        ("pagesize: 3", "f.yaml:1: no such option: --pagesize; did you mean --page-size?"),
        ("repository: /none", "f.yaml: repository is '/none', which cannot be read"),
        ("files-dir: /proc/x", "--files-dir is '/proc/x', which cannot be written"),
        (None, "which cannot be read"),
    ],
)
def test_check_says_of_the_file_what_the_server_says(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    if text is not None:
        file.write_text(text)
    result = run("check", "--config", str(file))
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_check_says_of_files_beyond_all_memory_what_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of a terabyte, which most machines cannot even map."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    tensor = {"dtype": "BF16", "shape": [1 << 39], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + (1 << 40))
    monkeypatch.setattr("minisgl_backend.host.model_check.has_gpu", lambda: False)
    refused = run("check", "--model", str(tmp_path))
    assert refused.exit_code == 2
    assert re.search(r"whose weights need .* of memory; .* are free", refused.stderr)
    with pytest.raises(ConfigError) as told:
        check_folder(EngineConfig(model=str(tmp_path)))
    assert refused.stderr.split(";")[0] == f"error: {told.value}".split(";")[0], "memory comes and goes"


def test_a_file_that_cannot_be_mapped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_addresses(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 64424509553 bytes from file </x>: Cannot allocate memory (12)")

    monkeypatch.setattr("minisgl_backend.weights.files.safe_open", no_addresses)
    refused = run("check")
    assert refused.exit_code == 2
    assert re.search(
        r"^error: .*model\.safetensors has .*, which cannot be mapped into memory \(unable", refused.stderr
    )


def test_the_null_runner_needs_nothing_that_could_compute(tmp_path: Path) -> None:
    assert run("check", "--runner", "null", "--attn", "fa").exit_code == 0


def test_options_of_other_servers_are_answered_with_ours() -> None:
    result = run("check", "--max-model-len", "100")
    assert (result.exit_code, result.stderr) == (2, "error: --max-model-len is vLLM's; here --max-seq-len-override\n")
    assert "did you mean --page-size?" in run("generate", "--pagesize", "3", "Hello").stderr


def test_the_version() -> None:
    assert run("--version").output == f"minisgl-backend {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page-size", "3"), "page_size is 3; allowed: a power of two"),
        (("--tp", "x"), "tp is 'x'"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--attn", "best"), "attention_backend is 'best'"),
    ],
)
def test_wrong_options_end_with_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_generate_prints_the_answers() -> None:
    result = run("generate", "--runner", "null", "--num-pages", "64", "--max-tokens", "30", "one", "two")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all("computes nothing" in line for line in lines)
