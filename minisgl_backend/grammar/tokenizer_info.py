"""Describes the model's tokenizer to xgrammar: `python -m minisgl_backend.grammar.tokenizer_info`, started by an engine
core.

It imports transformers and goes through all tokens, which takes seconds that the core has not: it loads weights.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from minisgl_backend.grammar.helper import Helper, begin_helper
from minisgl_backend.grammar.light_import import absent_torch, import_xgrammar


class TokenizerSource(msgspec.Struct, frozen=True):
    """Where a tokenizer is, and what the model makes of it."""

    folder: str
    trust_remote_code: bool
    vocab_size: int  # of the model's logits
    eos_token_ids: list[int]


class Description(msgspec.Struct, frozen=True):
    """xgrammar's JSON of a TokenizerInfo, or why there is none."""

    info: str = ""
    error: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Sends one Description."""
    parser = argparse.ArgumentParser(description="Describes a tokenizer to an engine core, which starts it.")
    parser.add_argument("--source", required=True, help="TokenizerSource as JSON")
    helper = begin_helper(parser, arguments)
    source = msgspec.json.decode(helper.options.source, type=TokenizerSource)
    try:
        with helper.or_else_whole():
            description = Description(info=describe(source, helper))
    except Exception as error:
        description = Description(error=f"{error}" or type(error).__name__)
    helper.connection.send_bytes(msgspec.msgpack.encode(description))
    return 0


def describe(source: TokenizerSource, helper: Helper | None = None) -> str:
    """As xgrammar's JSON. Raises what transformers and xgrammar raise. `helper`: the process, which may do without
    torch."""
    if helper is None or helper.options.whole:
        return _info(_load(source), source)
    with absent_torch():
        tokenizer = _load(source)
    import_xgrammar(["torch"])
    return _info(tokenizer, source)


def _load(source: TokenizerSource) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)


def _info(tokenizer: Any, source: TokenizerSource) -> str:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=source.vocab_size, stop_token_ids=source.eos_token_ids or None
    )
    return str(info.serialize_json())


if __name__ == "__main__":
    sys.exit(main())
