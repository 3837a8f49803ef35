"""Which states of a prompt the prefix cache is to keep, for models with states: a match can end only behind one."""

from __future__ import annotations

from typing import Any

from minisgl_backend.cache.prefix_cache import PrefixMatch
from minisgl_backend.scheduler.sequence import Sequence


def states_to_keep(sequence: Sequence, match: PrefixMatch[Any], page_size: int) -> dict[int, bool]:
    """The page borders behind which the prompt's chunks leave states, ascending: tokens -> whether several prompts are
    known to begin so.

    These are the end of what a later turn renders alike; where the prompt leaves what the cache has pages of, so that
    the third prompt of a kind finds a state there; what the prompt's parts say (`Request.borders`), so that the second
    one does; and for sequences that wait for this one's prompt, its end.
    """
    matched, total = match.num_pages * page_size, len(sequence.token_ids)
    last = total - 1  # the last token is always computed: an equal prompt matches no more than those before it
    borders = {min(sequence.stable_len, last): False}
    group = sequence.group
    if group is not None and group.leader is sequence and group.held_back:
        borders[last] = False
    borders |= dict.fromkeys((*sequence.borders, match.known_pages * page_size), True)
    whole: dict[int, bool] = {}
    for tokens, shared in borders.items():
        border = min(tokens, last) // page_size * page_size
        whole[border] = shared or whole.get(border, False)
    return {border: whole[border] for border in sorted(whole) if border > matched}
