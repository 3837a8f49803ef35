"""Which engine core gets a request: the cached prefix, the load, deaths, and what is remembered."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from minisgl_backend.delivery import router as module
from minisgl_backend.delivery.router import BLOCK_TOKENS, MARGIN_SEQUENCES, SEQUENCE_TOKENS, Router

PAGE = 16
UIDS = count(1)


def prompt(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, length).astype("<i4").tobytes()


def make(num_cores: int, num_pages: int = 10_000) -> Router:
    router = Router(num_cores)
    for core in range(num_cores):
        router.note_up(core, PAGE, num_pages)
    return router


def place(router: Router, token_ids: bytes, n: int = 1) -> tuple[int, int | None]:
    uid = next(UIDS) * 100
    return uid, router.assign(uid, n, token_ids)


def ask(router: Router, token_ids: bytes) -> int | None:
    """Where a request goes that ends at once."""
    uid, core = place(router, token_ids)
    router.release([uid])
    return core


def test_requests_that_share_nothing_take_turns() -> None:
    router = make(3)
    assert [ask(router, prompt(seed, 500)) for seed in range(6)] == [0, 1, 2, 0, 1, 2], "one after the other"
    running = [place(router, prompt(seed, 30))[1] for seed in range(30)]
    assert [running.count(core) for core in range(3)] == [10, 10, 10], "side by side"


def test_a_prefix_leads_to_its_core() -> None:
    router = make(2)
    documents = [prompt(seed, 1000) for seed in range(4)]
    cores = [ask(router, document) for document in documents]
    for document, core in reversed(list(zip(documents, cores, strict=True))):
        assert ask(router, document + prompt(99, 50)) == core
        assert ask(router, document[: 800 * 4]) == core
    assert ask(router, documents[0][4:]) in (0, 1), "another beginning is another prompt"


def test_the_longer_of_two_prefixes_wins() -> None:
    router = make(2)
    short, rest = prompt(1, 256), prompt(2, 1000)
    assert ask(router, short + prompt(3, 64)) == 0
    assert ask(router, prompt(4, 500)) == 1
    place(router, prompt(5, 10)), place(router, prompt(6, 10))
    busy, core = place(router, short + rest)
    assert core == 0
    assert ask(router, short + rest + short) == 0
    router.release([busy])


def test_a_prefix_makes_up_for_as_much_load_as_it_saves_computation() -> None:
    router = make(2)
    system = prompt(1, 4 * SEQUENCE_TOKENS)
    placed = [place(router, system + prompt(seed, 40))[1] for seed in range(2, 22)]
    first_elsewhere = placed.index(1)
    assert first_elsewhere == 4, "while it is worth more than the sequences that the other core has less"
    assert abs(placed.count(0) - placed.count(1)) <= 1, "once both have it, load alone decides"


def test_no_prefix_is_worth_more_than_the_margin() -> None:
    router = make(2)
    document = prompt(1, 100 * SEQUENCE_TOKENS)
    placed = [place(router, document)[1] for _ in range(2 * MARGIN_SEQUENCES)]
    assert placed.index(1) == MARGIN_SEQUENCES + 1
    assert placed.count(1) >= (2 * MARGIN_SEQUENCES - MARGIN_SEQUENCES) // 2


def test_siblings_count_as_many_and_ends_free_their_place() -> None:
    router = make(2)
    uid, core = place(router, prompt(1, 10), n=4)
    assert core == 0
    assert [place(router, prompt(2 + index, 10))[1] for index in range(4)] == [1, 1, 1, 1]
    router.release([uid, uid + 1, uid + 1, 123456789])
    assert router.by_core([uid, uid + 2, uid + 3, 5]) == {0: [uid + 2, uid + 3]}
    assert [place(router, prompt(6 + index, 10))[1] for index in range(2)] == [0, 0], "two there, and four elsewhere"


def test_a_dead_core_loses_its_sequences_and_its_prefixes_and_gets_nothing() -> None:
    router = make(2)
    documents = [prompt(1, 640), prompt(2, 640)]
    (lost, first), (kept, second) = place(router, documents[0], n=3), place(router, documents[1])
    assert (first, second) == (0, 1)
    assert router.note_down(0) == [lost, lost + 1, lost + 2]
    assert {ask(router, documents[0]) for _ in range(3)} == {1}
    assert router.by_core([lost, kept]) == {1: [kept]}
    router.note_up(0, PAGE, 100)
    assert ask(router, documents[0]) == 1, "the living core has it by now"
    assert ask(router, prompt(3, 640)) == 0, "nothing is there any more"
    assert router.note_down(1) == [kept]
    assert router.note_down(0) == []
    assert ask(router, documents[0]) is None


def test_a_core_that_did_not_take_a_request_is_left_out() -> None:
    router = make(2)
    uid, first = place(router, prompt(0, 500), n=4)
    assert first is not None
    router.release(range(uid, uid + 4))
    assert router.assign(uid, 4, prompt(0, 500), without={first}) == 1 - first
    router.release(range(uid, uid + 4))
    assert router.assign(uid, 4, prompt(0, 500), without={0, 1}) is None
    assert [place(router, prompt(index, 10))[1] for index in (1, 2)] in ([0, 1], [1, 0]), "nothing counts as there"


def test_what_a_core_cannot_hold_is_forgotten_ends_first() -> None:
    router = make(2, num_pages=10 * BLOCK_TOKENS // PAGE)
    first = prompt(1, 8 * BLOCK_TOKENS)
    assert ask(router, first) == 0
    assert ask(router, prompt(2, 64)) == 1
    assert ask(router, first[: 4 * 4 * BLOCK_TOKENS] + prompt(3, 4 * BLOCK_TOKENS)) == 0
    core = router._cores[0]
    assert len(core.blocks) == 10
    hashes = list(module._block_hashes(first, 4 * BLOCK_TOKENS))
    assert [value in core.blocks for value in hashes] == [True] * 6 + [False] * 2


def test_prompts_of_another_salt_are_others() -> None:
    router, text = make(2), prompt(1, 8 * BLOCK_TOKENS)
    assert router.assign(1, 1, text, salt="a") == 0
    assert router.assign(2, 1, text, salt="b") == 1
    assert router.assign(3, 1, text, salt="a") == 0
    assert router.assign(4, 1, text, salt="b") == 1


@pytest.mark.parametrize(("page_size", "block"), [(1, BLOCK_TOKENS), (64, 64), (128, 128)])
def test_blocks_are_whole_pages(page_size: int, block: int) -> None:
    router = Router(2)
    for core in range(2):
        router.note_up(core, page_size, 1000)
    document = prompt(1, 4 * block + 5)
    ask(router, document)
    assert len(router._cores[0].blocks) == 4
