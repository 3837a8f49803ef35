"""Which states of a prompt the prefix cache is to keep, for models with states: a match can end only behind one."""

from __future__ import annotations

from itertools import accumulate, repeat, takewhile
from operator import mul
from typing import Any

from minisgl_backend.cache.prefix_cache import PrefixMatch
from minisgl_backend.cache.state_slots import PROVED, SUPERSEDED, UNPROVED
from minisgl_backend.scheduler.sequence import Sequence

# Tokens before a prompt's end behind which the last of the states within it is left; others at twice the distance each.
LEAST_SPACING = 8192


def states_to_keep(sequence: Sequence, match: PrefixMatch[Any], page_size: int) -> dict[int, int]:
    """The page borders behind which the prompt's chunks leave states, ascending: tokens -> what a state is worth
    (`cache/state_slots.py`).

    PROVED, as several prompts are known to begin so: where the prompt leaves what the cache has pages of, so that the
    third prompt of a kind finds a state there, and what the prompt's parts say (`Request.borders`), so that the second
    one does. UNPROVED: the end of what a later turn renders alike and, for sequences that wait for this one's prompt,
    its end. SUPERSEDED: within long prompts, so that one that differs early computes at most as much again as follows.
    """
    matched, total = match.num_pages * page_size, len(sequence.token_ids)
    last = total - 1  # the last token is always computed: an equal prompt matches no more than those before it
    distances = takewhile(lambda tokens: tokens < total, accumulate(repeat(2), mul, initial=LEAST_SPACING))
    kept = [(total - distance, SUPERSEDED) for distance in distances]
    kept.append((sequence.stable_len, UNPROVED))
    group = sequence.group
    if group is not None and group.leader is sequence and group.held_back:
        kept.append((last, UNPROVED))
    kept += [(tokens, PROVED) for tokens in (*sequence.borders, match.known_pages * page_size)]
    # The later ones of a border are worth more.
    borders = {min(tokens, last) // page_size * page_size: worth for tokens, worth in kept}
    return {border: borders[border] for border in sorted(borders) if border > matched}
