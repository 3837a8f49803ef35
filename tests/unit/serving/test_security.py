"""What neither a request nor a model folder may do: run code, read files, bring templates."""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
from pathlib import Path

import pytest

import minisgl_backend
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.serving.tensors import INPUTS
from minisgl_backend.text.tokenizer import Tokenizer

PACKAGE = Path(minisgl_backend.__file__).parent
USER = [{"role": "user", "content": "x"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(find_model_dir("demo") / name, tmp_path / name)
    return tmp_path


def change(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_run_in_a_sandbox(folder: Path, template: str) -> None:
    change(folder, chat_template=template)
    with pytest.raises(InvalidRequestError, match="messages"):
        Tokenizer(folder).render(USER)


def test_code_in_a_model_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    change(folder, tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    with contextlib.suppress(ConfigError):  # some transformers fall back to the plain tokenizer instead
        Tokenizer(folder)
    assert not ran.exists()
    assert EngineConfig().trust_remote_code is False


@pytest.mark.parametrize("name", ["chat_template", "conversation", "tokenize", "tokenizer_kwargs"])
def test_a_request_brings_no_template(folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        Tokenizer(folder).render(USER, **{name: "{{ 7 * 7 }}"})


def test_no_input_names_a_model_or_a_file() -> None:
    assert not [
        tensor.name for tensor in INPUTS if any(word in tensor.name for word in ("path", "file", "model", "dir"))
    ]


def test_nothing_is_unpickled_or_evaluated() -> None:
    forbidden = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & forbidden, path
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in ("recv_pyobj", "send_pyobj", "load_pickle"), path
                assert not (isinstance(node.func, ast.Name) and called in ("eval", "exec")), path
                if ast.unparse(node.func) == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), path
