"""Prompts with contents: what they share with others in the prefix cache, in the router and in hashes of pages."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl_backend.cache.changes import page_hashes
from minisgl_backend.cache.content_ids import FIRST, content_ids
from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.delivery.router import _block_hashes
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL
from minisgl_backend.request import Content, Request
from tests.fakes import make_request
from tests.unit.scheduler.test_scheduler import limits, make_loop

PROMPT = np.array([*range(10), *[7] * 8, *range(30, 41)], dtype=np.int32)  # 7 stands for what an image shows
CAT, DOG = (Content(start=10, length=8, digest=digest) for digest in (b"cat", b"dog"))


def test_ids_are_those_of_the_tokens_but_where_contents_are() -> None:
    assert content_ids(PROMPT, ()) is PROMPT
    cat, dog = content_ids(PROMPT, (CAT,)), content_ids(PROMPT, (DOG,))
    assert np.array_equal(np.flatnonzero(cat != PROMPT), np.arange(10, 18))
    assert (cat[10:18] >= FIRST).all()
    assert len({*cat[10:18].tolist(), *dog[10:18].tolist()}) == 16
    assert np.array_equal(content_ids(PROMPT, (CAT,)), cat)
    moved = content_ids(PROMPT, (msgspec.structs.replace(CAT, start=11),))
    assert np.array_equal(moved[11:19], cat[10:18]), "they go by the place in the content"
    assert np.array_equal(content_ids(PROMPT[:12], (CAT,)), cat[:12])


def test_the_first_two_ids_hold_what_tells_two_contents_apart() -> None:
    """An id has 61 bits, of which one who chooses both contents finds an equal pair within an hour."""
    ids = [content_ids(PROMPT, (msgspec.structs.replace(CAT, digest=bytes([n])),))[10:18] for n in range(200)]
    assert len({one[0] for one in ids}) == len({one[1] for one in ids}) == 200
    assert {int(one[1] - one[0]) for one in ids} != {1}, "the second says more than the first"
    assert all((one[2:] - one[0] == range(2, 8)).all() and (one >= FIRST).all() for one in ids)


def test_vectors_of_a_content_with_breaks() -> None:
    """What a family has between the rows of an image is part of the span, without vectors."""
    rows = msgspec.structs.replace(CAT, runs=(0, 3, 4, 3))
    assert rows.num_vectors == 6
    assert rows.vector_runs() == [(10, 13), (14, 17)]
    assert (CAT.end, CAT.num_vectors) == (18, 8)
    assert CAT.vector_runs() == [(10, 18)]
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(rows), type=Content)
    assert back == rows


def test_pages_are_shared_as_far_as_contents_are_equal() -> None:
    manager = KVManager(40, CacheGroups((FULL,), 4), 4, 20, "radix")
    for row, contents in enumerate([(CAT,), ()]):
        ids = content_ids(PROMPT, contents)
        match = manager.match(ids)
        assert match.num_pages == (0, 2)[row], "the text before the image"
        manager.release(manager.acquire(row, match, len(ids)), ids)
    cached = [manager.cached_tokens(content_ids(PROMPT, contents)) for contents in ((CAT,), (DOG,), ())]
    assert cached == [28, 8, 28]
    two = (CAT, Content(start=24, length=4, digest=b"dog"))
    assert manager.cached_tokens(content_ids(PROMPT, two)) == 24
    assert manager.cached_tokens(content_ids(PROMPT, (CAT,)), b"salt") == 0
    manager.check([])


def test_hashes_of_pages_of_text_are_the_same_with_contents_behind_them() -> None:
    plain, cat, dog = (page_hashes(None, content_ids(PROMPT, contents), 4) for contents in ((), (CAT,), (DOG,)))
    assert plain[:2] == cat[:2] == dog[:2]
    assert not {*plain[2:]} & {*cat[2:]}
    assert not {*dog[2:]} & {*cat[2:]}


def test_the_router_tells_contents_apart() -> None:
    prompt = PROMPT.tobytes()
    plain, cat, dog = (list(_block_hashes(prompt, 16, "", contents)) for contents in ((), (CAT,), (DOG,)))
    assert plain[:2] == cat[:2] == dog[:2]
    assert len({plain[2], cat[2], dog[2]}) == 3
    assert cat == list(_block_hashes(prompt, 16, "", (CAT,)))


def test_the_scheduler_publishes_what_requests_stand_for() -> None:
    """Also of a sequence that goes on behind its prompt."""
    loop = make_loop(limits())
    for uid, contents in enumerate([(CAT,), (DOG,), (CAT,), ()]):
        plain = make_request(uid, PROMPT.tolist(), ignore_eos=True, max_tokens=9)
        request = msgspec.msgpack.decode(
            msgspec.msgpack.encode(msgspec.structs.replace(plain, contents=contents)), type=Request
        )
        before = loop.scheduler.stats().total_cached_tokens
        loop.scheduler.add(request)
        loop.run()
        found = loop.scheduler.stats().total_cached_tokens - before
        assert found == (0, 8, 28, 8)[uid]
    answered = [*PROMPT.tolist(), *loop.records.tokens[0]]
    manager = loop.scheduler._running.kv
    assert manager.cached_tokens(content_ids(np.array(answered, dtype=np.int32), (CAT,))) == 36
