"""`python -m minisgl_backend.host.gguf_model FILE FOLDER`: converts a GGUF file to a model folder in Hugging Face's
format.

Needs transformers and the package gguf, which `minisgl fetch` puts on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from minisgl_backend.models.gguf_folder import write_files
from minisgl_backend.models.gguf_tokenizer import GGUFTokenizer
from minisgl_backend.weights.gguf_header import GGUFHeader


def convert(file: Path, folder: Path) -> None:
    """Writes config, weights (bfloat16) and tokenizer into the new `folder`."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    # The weights are unquantized by now; transformers remembers their format and would refuse to write them.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    write_files(folder, GGUFTokenizer(GGUFHeader.read(file)).files())
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes it readable by its user only; the server may run as another user


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
