"""OpenAI's lists, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from minisgl_backend.openai.errors import invalid

Items = Sequence[dict[str, Any]]


def page(items: Items, request: Request, *, max_limit: int, default: int) -> dict[str, Any]:
    """The page that `limit`, `after` and `order` of the query ask for; newest first. `items`: oldest first. Raises
    ApiError, also for an item behind which the page would begin and that is not there."""
    query = request.query_params
    text, after = query.get("limit", str(default)), query.get("after")
    if not text.isdecimal() or not 1 <= int(text[:9]) <= max_limit:
        raise invalid("limit", f"limit is {text[:60]!r}; allowed: 1 to {max_limit}")
    check_order(order := query.get("order", "desc"))
    if after is not None and all(item["id"] != after for item in items):
        raise invalid("after", f"after is {after[:100]!r}, which is not in the list")
    return page_behind(items if order == "asc" else items[::-1], after, int(text))


def check_order(order: str) -> None:
    """Raises ApiError for an unknown one."""
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {order[:60]!r}; allowed: asc, desc")


def page_behind(ordered: Items, after: str | None, limit: int) -> dict[str, Any]:
    """At most `limit` items behind the one with the id `after`; from the beginning if there is none."""
    start = next((number for number, item in enumerate(ordered, 1) if item["id"] == after), 0)
    shown = ordered[start : start + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    has_more = start + limit < len(ordered)
    return {"object": "list", "data": shown, "first_id": first_id, "last_id": last_id, "has_more": has_more}
