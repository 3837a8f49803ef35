"""What `thinking_token_budget` needs of a model's format: its reasoning tags as token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.parsers.table import REASONING, find_reasoning
from minisgl_backend.request import ThinkingTags

TAIL = 16  # tokens at a prompt's end that may contain an opening tag


def thinking_tags(
    parser: str,
    budget: int,
    template: str,
    added_tokens: Collection[str],
    encode: Callable[[str], Sequence[int]],
    prompt_tail: str,
) -> ThinkingTags:
    """The tags of the format named by `parser`; auto: the format that template and added tokens show.

    `encode`: text to ids, without special tokens at its ends. `prompt_tail`: the text of the prompt's last TAIL tokens.
    Raises InvalidRequestError for a model that has no reasoning, as far as known.
    """
    if parser not in ("auto", "none", *REASONING):
        allowed = ", ".join(("auto", "none", *REASONING))
        raise InvalidRequestError(f"reasoning_parser is {parser!r:.60}; allowed: {allowed}")
    row = find_reasoning(template, added_tokens) if parser == "auto" else REASONING.get(parser)
    if row is None or row.reasoning is None:
        raise InvalidRequestError(
            f"thinking_token_budget is {budget}; allowed: none, as it is not known how this model writes thoughts "
            "(--reasoning-parser says it)"
        )
    opening, closing, behind = row.reasoning
    return ThinkingTags(
        opening=tuple(encode(opening)),
        closing=tuple(encode(closing)),
        behind=tuple(encode(behind)) if behind else (),
        is_open=row.opens(prompt_tail),
    )
