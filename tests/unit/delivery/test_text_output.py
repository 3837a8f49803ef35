"""Chunks to texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_backend.delivery import text_output
from minisgl_backend.delivery.text_output import StreamError, TextOutputEncoder
from minisgl_backend.ipc.wire import Chunk, Part, TextOptions
from minisgl_backend.text.vocabulary import Vocabulary


@pytest.fixture
def answers() -> TextOutputEncoder:
    table = [bytes([i]) for i in range(256)]
    return TextOutputEncoder(Vocabulary(lambda ids, skip: bytes(ids).decode(), table, frozenset(), byte_exact=True))


def part(text: bytes, **fields: Any) -> Part:
    return Part(token_ids=np.frombuffer(text, np.uint8).astype("<i4").tobytes(), **fields)


def plain(arrays: Any) -> list[str]:
    (array,) = arrays.values()
    assert array.ndim == 1, "TensorRT-LLM's clients decode text_output[0]"
    return [item.decode() for item in array.tolist()]


def test_characters_are_whole(answers: TextOutputEncoder) -> None:
    first = plain(answers.encode(Chunk(uid=1, number=1, parts=(part("é".encode()[:1]),), options=TextOptions())))
    last = plain(answers.encode(Chunk(uid=1, number=2, parts=(part("é".encode()[1:], is_last=True),))))
    assert (first, last) == ([""], ["é"])
    assert len(answers) == 0


def test_what_is_no_text(answers: TextOutputEncoder) -> None:
    options = TextOptions(prompt="Q:")
    whole = part(b"A\x02", is_last=True, ends_with_stop_token=True)
    assert plain(answers.encode(Chunk(uid=1, number=1, parts=(whole,), options=options))) == ["Q:A"]


def test_each_response_may_have_all_text_so_far(answers: TextOutputEncoder) -> None:
    options = TextOptions(prompt="Q:", all_so_far=True)
    chunks = [Chunk(uid=1, number=1, parts=(part(b"A"),), options=options), Chunk(uid=1, number=2, parts=(part(b"B"),))]
    last = part(b"\x02", is_last=True, ends_with_stop_token=True)
    chunks.append(Chunk(uid=1, number=3, parts=(last,)))
    assert [plain(answers.encode(chunk)) for chunk in chunks] == [["Q:A"], ["Q:AB"], ["Q:AB"]]


def test_several_sequences(answers: TextOutputEncoder) -> None:
    parts = (part(b"a", is_last=True), part(b"b", is_last=True))
    chunk = Chunk(uid=1, number=1, parts=parts, options=TextOptions(prompt="-"))
    assert plain(answers.encode(chunk)) == ["-a", "-b"]
    assert len(answers) == 0


def test_streams_do_not_mix(answers: TextOutputEncoder) -> None:
    options = TextOptions()
    pieces = {1: "🎉".encode(), 2: "日".encode()}
    texts = {1: "", 2: ""}
    for number in range(1, 5):
        for uid, data in pieces.items():
            if number <= len(data):
                started = options if number == 1 else None
                chunk = Chunk(uid=uid, number=number, parts=(part(data[number - 1 : number]),), options=started)
                texts[uid] += plain(answers.encode(chunk))[0]
    assert texts == {1: "🎉", 2: "日"}


def test_streams_that_never_end_do_not_pile_up(answers: TextOutputEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_output, "MOST_STREAMS", 10, raising=False)
    for uid in range(100):
        answers.encode(Chunk(uid=uid, number=1, parts=(part(b"a"),), options=TextOptions()))
    assert len(answers) == 10
    assert plain(answers.encode(Chunk(uid=99, number=2, parts=(part(b"b"),)))) == ["b"]


def test_a_failure_and_a_lost_chunk_are_errors(answers: TextOutputEncoder) -> None:
    answers.encode(Chunk(uid=1, number=1, parts=(part(b"a"),), options=TextOptions()))
    with pytest.raises(StreamError, match="out of memory") as caught:
        answers.encode(Chunk(uid=1, number=2, failure=("INTERNAL", "out of memory"), forget=(1,)))
    assert caught.value.status == "INTERNAL"
    assert len(answers) == 0
    with pytest.raises(StreamError, match="restarted"):
        answers.encode(Chunk(uid=5, number=4, parts=(part(b"a"),)))
    assert plain(answers.encode(Chunk(uid=9, number=1))) == [""]


def test_token_ids_instead_of_text(answers: TextOutputEncoder) -> None:
    """Batch, beam, tokens; the prompt's before the first, where it is wanted."""
    prompt = np.array([7, 8], dtype="<i4").tobytes()
    first = Chunk(uid=1, number=1, parts=(part(b"ab"),), options=TextOptions(prompt_ids=prompt), token_ids=True)
    (ids,) = answers.encode(first).values()
    assert ids.dtype == np.int32
    assert ids.tolist() == [[[7, 8, 97, 98]]]
    last = Chunk(uid=1, number=2, parts=(part(b"", is_last=True),), token_ids=True)
    assert answers.encode(last)["output_ids"].shape == (1, 1, 0)
    assert len(answers) == 0


def test_an_answer_continues_the_prompt_before_it() -> None:
    """SentencePiece: the space before a word is part of its token, and only a whole text loses its first one."""
    table = [b" time", b"once"]
    words = Vocabulary(lambda ids, skip: "".join(table[i].decode() for i in ids), table, frozenset(), byte_exact=True)
    part_of = Part(token_ids=np.array([0, 0], "<i4").tobytes(), is_last=True)
    chunk = Chunk(uid=1, number=1, parts=(part_of,), options=TextOptions(prompt="Once upon a"))
    assert plain(TextOutputEncoder(words).encode(chunk)) == ["Once upon a time time"]
