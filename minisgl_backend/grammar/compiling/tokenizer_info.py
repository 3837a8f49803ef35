"""Describes the model's tokenizer to xgrammar: `python -m minisgl_backend.grammar.compiling.tokenizer_info`, started by
an engine core.

It reads all tokens, which takes seconds, while the core loads weights. Where the files say all, transformers is not
imported, which would take most of that time.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from minisgl_backend.grammar.compiling.helper import Helper, begin_helper
from minisgl_backend.grammar.compiling.light_import import UNUSED_PACKAGES, import_xgrammar
from minisgl_backend.process.absent import absent_torch
from minisgl_backend.text.tokenizer_file import TokenizerFiles


class TokenizerSource(msgspec.Struct, frozen=True):
    """Location of a tokenizer, and the model's vocabulary size and EOS tokens."""

    folder: str
    trust_remote_code: bool
    vocab_size: int  # of the model's logits
    eos_token_ids: list[int]


class Description(msgspec.Struct, frozen=True):
    """xgrammar's JSON of a TokenizerInfo, or an error message."""

    info: str = ""
    error: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Sends one Description."""
    parser = argparse.ArgumentParser(description="Describes a tokenizer to an engine core, which starts it.")
    parser.add_argument("--source", required=True, help="TokenizerSource as JSON")
    helper = begin_helper(parser, arguments)
    source = msgspec.json.decode(helper.options.source, type=TokenizerSource)
    try:
        with helper.or_retry_with_all_imports():
            description = Description(info=describe(source, helper))
    except Exception as error:
        description = Description(error=f"{error}" or type(error).__name__)
    helper.connection.send_bytes(msgspec.msgpack.encode(description))
    return 0


def describe(source: TokenizerSource, helper: Helper | None = None) -> str:
    """The tokenizer as xgrammar's JSON. Raises what transformers and xgrammar raise. `helper`: the current process if
    it may avoid importing torch."""
    if helper is None or helper.options.all_imports:
        return _info(_load(source), source)
    files = TokenizerFiles(source.folder)
    if files.suffice(trust_remote_code=source.trust_remote_code):
        import_xgrammar(UNUSED_PACKAGES)
        return _info(_fast_tokenizer(files.backend), source)
    with absent_torch():
        tokenizer = _load(source)
    import_xgrammar(["torch"])
    return _info(tokenizer, source)


def _fast_tokenizer(backend: Any) -> Any:
    """A tokenizer that xgrammar takes for a fast one of transformers, with only the attributes that xgrammar uses."""
    import xgrammar

    class BackendTokenizer(xgrammar.tokenizer_info.PreTrainedTokenizerFast):  # type: ignore[misc]
        backend_tokenizer = backend

        def get_vocab(self) -> dict[str, int]:
            return dict(backend.get_vocab())

    return object.__new__(BackendTokenizer)  # the constructor would need files


def _load(source: TokenizerSource) -> Any:
    from minisgl_backend.text.tokenizer import load_tokenizer

    return load_tokenizer(source.folder, trust_remote_code=source.trust_remote_code)


def _info(tokenizer: Any, source: TokenizerSource) -> str:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=source.vocab_size, stop_token_ids=source.eos_token_ids or None
    )
    return str(info.serialize_json())


if __name__ == "__main__":
    sys.exit(main())
