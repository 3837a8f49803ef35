"""OpenAI's codes of errors about images, by what this project says of them."""

from __future__ import annotations

import re

_CODES = tuple(
    (code, re.compile(pattern))
    for code, pattern in (
        ("invalid_base64_image", r" is no base64 \(| holds characters that are not base64's"),
        ("empty_image_file", r" is empty; allowed: an image file"),
        ("image_file_not_found", r", which is no file here$"),
        (
            "image_file_too_large",
            r"request's images to \d+ bytes|; allowed: an image of \d+ bytes| bytes; allowed: \d+$",
        ),
        ("image_too_large", r" is \d+x\d+; allowed: at most \d+ pixels"),
        ("invalid_image", r" is \d+x\d+; allowed: a longer side of at most "),
        ("invalid_image_format", r" is no image that is served; | has pixels of the kind "),
        (
            "image_parse_error",
            r" cannot be decoded \(| took a worker down | needs more memory than a worker|, and its header says \d+x",
        ),
        (
            "image_fetch_failed",
            r" was not read in | cannot be read \(| was not connected to | answers with status | is compressed by its "
            r"server| leads on more | has no valid Content-Length| has a head of more | comes in more than ",
        ),
        (
            "invalid_image_url",
            r"allowed: a data URL| has scheme '| leads from https | has a user's name; | is no URL \(| has host '"
            r"| has blanks or control| letters that are not encoded; ",
        ),
    )
)


def image_code(message: str) -> str | None:
    """None for an error about anything else."""
    if "image" not in message and " host '" not in message and "source" not in message and "file_id" not in message:
        return None
    return next((code for code, pattern in _CODES if pattern.search(message)), None)
