"""Answers of a grammar, drawn at random from what its masks allow."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar

from minisgl_backend.grammar.compiling.translate import translate
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import Grammar

MOST_TOKENS = 1500


@lru_cache(maxsize=1)
def demo_compiler() -> tuple[Any, tuple[bytes, ...]]:
    """xgrammar's GrammarCompiler for the demo model's vocabulary, and the tokens' texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(find_model_dir("demo")))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), tuple(info.decoded_vocab)


def ebnf(schema: Any) -> str:
    """Raises InvalidRequestError for what is refused."""
    return translate(Grammar(kind="json_schema", text=json.dumps(schema))).text


def accepts(schema: Any, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(xgrammar.Grammar.from_ebnf(ebnf(schema)), text))


def samples(schema: Any, count: int) -> list[str | None]:
    """Answers; None for one that did not end within MOST_TOKENS. Each step draws the next byte, and a token that begins
    with it: a vocabulary has hundreds of tokens for each way to go on with a text, and one quotation mark."""
    compiler, texts = demo_compiler()
    compiled = compiler.compile_grammar(ebnf(schema))
    return [_sample(compiled, texts, random.Random(seed)) for seed in range(count)]


def _sample(compiled: Any, texts: tuple[bytes, ...], chance: random.Random) -> str | None:
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = np.zeros((1, -(-len(texts) // 32)), dtype=np.int32)
    written = b""
    for _ in range(MOST_TOKENS):
        matcher.fill_next_token_bitmask(bitmask, 0)
        by_byte: dict[bytes, list[int]] = {}
        for token in np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: len(texts)].nonzero()[0].tolist():
            by_byte.setdefault(texts[token][:1], []).append(token)
        assert by_byte, f"nothing may follow {written!r}"
        token = chance.choice(by_byte[chance.choice(list(by_byte))])
        assert matcher.accept_token(token)
        if matcher.is_terminated():
            return written.decode()
        written += texts[token]
    return None
