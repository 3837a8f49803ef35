"""vLLM's limits of media, as they are written there."""

from __future__ import annotations

import pytest

from minisgl_backend.config import OPTIONS
from minisgl_backend.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["8", '{"image": 8}', "image=8", '{"image": 8, "video": 0}', "image=8,audio=0", '{"image": {"count": 8}}']
)
def test_a_number_of_images(text: str) -> None:
    option = OPTIONS["max_images"]
    assert option.flags == ("--max-images", "--limit-mm-per-prompt")
    assert option.parse(text) == 8


@pytest.mark.parametrize(
    "text",
    ["eight", '{"image": 0}', "image=101", '{"video": 1}', '{"image": 8, "video": 1}', '{"image": 8', "image", "[8]"],
)
def test_what_is_no_number_of_images_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"max_images is .* allowed: 1 to 100"):
        OPTIONS["max_images"].parse(text)
