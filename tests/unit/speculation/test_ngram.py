"""Prompt lookup finds the longest of the latest matches, token by token as at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl_backend.speculation import ngram
from minisgl_backend.speculation.ngram import NgramProposer


def matches(tokens: list[int], shortest: int, longest: int) -> set[int]:
    """The length of the longest match of the last tokens, and the positions behind it."""
    total, best, found = len(tokens), shortest - 1, {0}
    for end in range(shortest, total):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[total - 1 - length]:
            length += 1
        if length > best:
            best, found = length, set()
        if length == best:
            found.add(end)
    return found if best >= shortest else set()


@pytest.mark.parametrize("seed", range(6))
def test_it_says_what_followed_the_longest_match(seed: int) -> None:
    rng = random.Random(seed)
    shortest, longest = rng.choice([(1, 3), (2, 5), (3, 3), (2, 8)])
    proposer = NgramProposer(shortest, longest)
    tokens = [rng.randrange(40) for _ in range(rng.randrange(1, 200))]
    for _ in range(60):
        grown = rng.randrange(30)
        start = rng.randrange(len(tokens))
        tokens += tokens[start : start + grown] if rng.random() < 0.5 else [rng.randrange(40) for _ in range(grown)]
        most = rng.randrange(1, 9)
        said = proposer.propose(0, 5, np.array(tokens, dtype=np.int32), most).tolist()
        # Chains are short: of many matches the latest are compared.
        all_matches = matches(tokens, shortest, longest)
        assert bool(said) == bool(all_matches) or len(said) <= most
        if said and len(all_matches) <= 4:
            followed = [[*(tokens[end:] * most)][:most] for end in all_matches]
            assert (
                said in [one[: len(said)] for one in followed]
                or sum(tokens.count(token) for token in set(tokens[-1:])) > ngram.LONGEST_CHAIN
            )


def test_a_loop_goes_round() -> None:
    proposer = NgramProposer(2, 4)
    loop = [9, 1, 2, 1, 2, 1, 2]
    assert proposer.propose(0, 1, np.array(loop, dtype=np.int32), 5).tolist() == [1, 2, 1, 2, 1]
    assert proposer.propose(0, 1, np.array([*loop, 7], dtype=np.int32), 5).tolist() == []


def test_a_short_match_says_little() -> None:
    tokens = np.array([5, 6, 1, 2, 3, 4, 7, 6, 1], dtype=np.int32)
    assert NgramProposer(2, 4).propose(0, 1, tokens, 5).tolist() == [2, 3]
    assert NgramProposer(2, 2).propose(0, 1, tokens, 5).tolist() == [2, 3, 4, 7, 6]


def test_of_equal_matches_the_latest_counts() -> None:
    tokens = np.array([1, 2, 3, 8, 1, 2, 3, 9, 0, 1, 2, 3], dtype=np.int32)
    assert NgramProposer(2, 3).propose(0, 1, tokens, 2).tolist() == [9, 0]


def test_a_longer_match_is_better_than_a_later_one() -> None:
    tokens = np.array([4, 1, 2, 3, 8, 1, 2, 3, 9, 0, 4, 1, 2, 3], dtype=np.int32)
    assert NgramProposer(2, 4).propose(0, 1, tokens, 1).tolist() == [8]


def test_another_sequence_of_the_row_knows_nothing_of_the_one_before() -> None:
    proposer = NgramProposer(1, 4)
    assert proposer.propose(3, 1, np.array([5, 6, 5], dtype=np.int32), 1).tolist() == [6]
    assert proposer.propose(3, 2, np.array([6, 5], dtype=np.int32), 1).tolist() == []


def test_memory_is_bounded_and_old_tokens_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "WINDOW", 1 << 10)
    proposer = NgramProposer(2, 4)
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 100_000, 5000).astype(np.int32)
    tokens[10:13] = tokens[4000:4003] = tokens[4990:4993] = (1, 2, 3)
    for total in (9, 100, 3000, 3001, 4990, 4992):
        proposer.propose(0, 1, tokens[:total], 3)
    assert proposer.propose(0, 1, tokens[:4992], 1).tolist() == [3], "4000 is among the last 1,024"
    assert proposer.propose(0, 2, tokens[:3999], 1).tolist() == []
    tokens[3500:3502] = (1, 2)
    assert proposer.propose(0, 2, tokens[:3502], 1).tolist() == [], "10 is not"
    index = proposer._rows[0]
    assert len(index._before) == 1 << 10
