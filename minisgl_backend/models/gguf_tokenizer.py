"""`python -m minisgl_backend.models.gguf_tokenizer FILE FOLDER`: writes the tokenizer and the chat template of a GGUF
file, as transformers reads them, as files of a model folder.

It runs as a separate process, since the calling process should import neither torch nor transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Writes tokenizer.json and what belongs to it into the existing `folder`."""
    import transformers

    # Not AutoTokenizer, which reads the file twice more for its configuration.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
