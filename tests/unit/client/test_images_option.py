"""Images of a client's request: files' bytes, paths and data URLs become vllm_backend's tensor."""

import base64

import pytest

from client.errors import InvalidRequest
from client.request import build_tensors


def test_forms(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"abc")
    url = "data:image/png;base64,AAAA"
    tensors = build_tensors("x", None, False, 0, {"images": [b"abc", path, str(path), url]})
    assert tensors["image"].values == (*[base64.b64encode(b"abc").decode()] * 3, url)
    assert tensors["image"].is_list
    assert build_tensors("x", None, False, 0, {"images": b"abc"})["image"].values == ("YWJj",)


@pytest.mark.parametrize(
    ("images", "said"),
    [([3], r"images\[0\] is 3"), (3, "images is 3"), (["/no/file"], r"images\[0\] cannot be read")],
)
def test_refusals(images, said):
    with pytest.raises(InvalidRequest, match=said):
        build_tensors("x", None, False, 0, {"images": images})
