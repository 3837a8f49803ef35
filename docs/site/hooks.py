"""Links of a page that leave docs/ (to the source, to results) go to the repository on the site, if it names one."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>\.\./[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Raises FileNotFoundError for a link to a file that is not there."""
    docs = Path(config.docs_dir)

    def replace(match: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(match["target"]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {match['target']}, which is not there")
        if not config.repo_url:
            return match["words"]
        path = PurePosixPath(target.relative_to(docs.parent))
        return f"[{match['words']}]({config.repo_url.rstrip('/')}/blob/main/{path}{match['anchor'] or ''})"

    return _LINK.sub(replace, markdown)
