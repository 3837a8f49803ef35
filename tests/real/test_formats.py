"""Calls in every format, cut at every token of real tokenizers, as a stream of the server is."""

from __future__ import annotations

import pytest

from minisgl_backend.parsers.table import CALLS as FORMATS
from minisgl_backend.text.detokenizer import new_detokenizer
from minisgl_backend.text.vocabulary import Vocabulary, load_vocabulary
from tests.real.models import TOKENIZERS, tokenizer
from tests.real.test_templates import loaded
from tests.unit.parsers.formats import CALLS, SCHEMAS, WRITERS
from tests.unit.parsers.test_parsers import calls_of, content_of, run

# npm has no tokenizers of the other models: Qwen3's stands in for theirs.
TOKENIZER = {
    "harmony": "gptoss",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "llama3_json": "llama3_1",
    "pythonic": "llama3_1",
    "gemma4": "gemma3",
}


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    return {name: load_vocabulary(tokenizer(name)) for name in TOKENIZERS}


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_calls_cut_at_every_token(written: str, vocabularies: dict[str, Vocabulary]) -> None:
    name, write = WRITERS[written]
    of = TOKENIZER.get(name, "qwen3")
    row = FORMATS[name]
    ids = loaded(of).encode(write(CALLS), add_special_tokens=False)
    stream = new_detokenizer(vocabularies[of], skip_special_tokens=not row.special)
    pieces = [*(stream.feed([token]) for token in ids), stream.finish()]
    whole = run(row.new_calls(SCHEMAS), ["".join(pieces)])
    assert calls_of(whole) == CALLS
    assert content_of(whole) == ""
    assert run(row.new_calls(SCHEMAS), pieces) == whole
    for place in range(len(pieces)):
        assert run(row.new_calls(SCHEMAS), ["".join(pieces[:place]), "".join(pieces[place:])]) == whole
