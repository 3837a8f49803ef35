"""Helpers for grammars start without torch and transformers, and with them where that does not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from minisgl_backend.grammar.compiling.processes import TokenizerProcess
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource, describe
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir

pytest.importorskip("xgrammar")

PROGRAM = """
import sys
from minisgl_backend.grammar.compiling import compiler
from minisgl_backend.grammar.compiling.light_import import UNUSED_PACKAGES, import_xgrammar

xgrammar = import_xgrammar(UNUSED_PACKAGES)
compiler._check_library(xgrammar)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "triton"}))
import torch
print(int(torch.ones(3).sum()))
"""


def test_what_compiling_needs_is_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split("\n")[:2] == ["[]", "3"], done.stderr


CORE = """
import queue, sys
import msgspec
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers
from minisgl_backend.grammar.compiling.compilers import Job
from minisgl_backend.grammar.compiling.light_import import UNUSED_PACKAGES
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.request import Grammar

source = msgspec.json.decode(sys.argv[1], type=TokenizerSource)
compilers = GrammarCompilers(source, stubbed=UNUSED_PACKAGES)
done = queue.Queue()
grammar = Grammar(kind="json_schema", text='{"type": "object", "properties": {"n": {"type": "integer"}}}')
compilers.submit(Job(grammar=grammar, is_awaited=lambda: True, done=lambda *outcome: done.put(outcome)))
compiled, error = done.get(timeout=120)
print(error, type(compiled).__name__, sorted({name.partition(".")[0] for name in sys.modules} & set(UNUSED_PACKAGES)))
compilers.close()
"""


def test_a_first_grammar_imports_neither_where_it_is_used() -> None:
    """Else an engine core would import transformers, for a second or more."""
    command = [sys.executable, "-c", CORE, msgspec.json.encode(demo_source()).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == "None CompiledGrammar []", done.stderr


def demo_source() -> TokenizerSource:
    folder = find_model_dir("demo")
    model = ModelConfig.load(folder)
    return TokenizerSource(str(folder), False, model.vocab_size, list(model.eos_token_ids))


def described(source: TokenizerSource) -> tuple[str, str]:
    process = TokenizerProcess(source)
    try:
        description = process.description()
    finally:
        process.end()
    return description.info, description.error


def test_a_tokenizer_described_without_torch_is_the_same() -> None:
    info, error = described(demo_source())
    assert error == ""
    assert json.loads(info) == json.loads(describe(demo_source()))


def test_a_tokenizer_that_needs_torch_has_it(tmp_path: Path) -> None:
    """Code of a folder's own may import it."""
    source = demo_source()
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((Path(source.folder) / file).read_bytes())
    settings = json.loads((Path(source.folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "import torch\nfrom transformers import PreTrainedTokenizerFast\n\nclass Own(PreTrainedTokenizerFast): ...\n"
    )
    own = msgspec.structs.replace(source, folder=str(tmp_path), trust_remote_code=True)
    info, error = described(own)
    assert error == ""
    assert json.loads(info) == json.loads(describe(source))
