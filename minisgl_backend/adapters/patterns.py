"""The patterns of rank_pattern and alpha_pattern: regular expressions, which strangers may have written.

Python's `re` tries one way after another and lets nothing else of the process run meanwhile, so only those are taken
for which the ways are few: what PEFT's users write for names of modules.
"""

from __future__ import annotations

import re
from collections import Counter

ALLOWED = (
    "modules' names with . or \\., alternatives such as (q_proj|k_proj), [0-9] and \\d, up to two of \\d+ or [0-9]+, "
    "one .* and another at the end"
)
LONGEST_PATTERN, LONGEST_NAME, LONGEST_NUMBER = 4096, 512, 8  # characters
_MOST_WAYS = 256  # to match one place of a name, beside those of .*
_NUMBER = r"(?:\\d|\[0-9\])\+"
_WORD = r"(?:[\w-]|\\\.)+"
_TOKEN = re.compile(
    rf"(?P<any>\.\*)|(?P<number>{_NUMBER}|\((?:\?:)?{_NUMBER}\))|\((?:\?:)?(?P<words>{_WORD}(?:\|{_WORD})*)\)"
    r"|(?P<or>\|)|(?:[\w-]|\\\.|\.|\\d|\[(?:[a-zA-Z0-9_]|[a-z]-[a-z]|[0-9]-[0-9])+\])(?![*+?{])",
    re.ASCII,
)


def is_quick(pattern: str) -> bool:
    """Whether the pattern is ALLOWED, and its match with a name that `is_bounded` takes no time to speak of."""
    if len(pattern) > LONGEST_PATTERN:
        return False
    at, end = int(pattern.startswith("^")), len(pattern) - (pattern.endswith("$") and not pattern.endswith("\\$"))
    anys, ways, total = 0, 1, 0
    while at < end:
        token = _TOKEN.match(pattern, at, end)
        if token is None:
            return False
        at = token.end()
        if token["any"]:
            anys += at < end  # at the end it matches whatever is there
        elif token["number"]:
            ways *= LONGEST_NUMBER
        elif token["words"]:
            ways *= _ways(token["words"].split("|"))
        elif token["or"]:
            total, ways = total + ways, 1
    return anys <= 1 and total + ways <= _MOST_WAYS


def _ways(words: list[str]) -> int:
    """How many of these alternatives can match at one place: those that begin each other."""
    counts = Counter(word.replace("\\.", ".") for word in words)
    return max(sum(counts[word[:size]] for size in range(1, len(word) + 1)) for word in counts)


def is_bounded(name: str) -> bool:
    """Of a module or tensor."""
    return len(name) <= LONGEST_NAME and name.isprintable() and re.search(rf"\d{{{LONGEST_NUMBER + 1}}}", name) is None
