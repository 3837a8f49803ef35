"""Hostile and odd files: each has its answer; no process starts, and none but a worker can die of one."""

import base64
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images import pool as pools
from minisgl_backend.images.families.qwen_vl import QwenVL
from minisgl_backend.images.loading import SourceLoader
from minisgl_backend.images.parts import Source, data_of_url, take_images
from minisgl_backend.images.pool import Pool, Worker
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.reader import ImageLimits, ImageReader
from minisgl_backend.images.sizes import plain
from minisgl_backend.images.store import open_pixels
from minisgl_backend.process.processes import descendants, process_table
from tests.images.hostile import CASES, Accepted
from tests.seeing import picture


class _AsItIs(QwenVL):
    """No resizing, so that pixels can be looked at."""

    def size(self, width, height):
        super().size(width, height)
        return plain(width, height, (1, 1, 1), (1,))


@pytest.fixture(scope="module")
def reader():
    with contextlib.closing(ImageReader(_AsItIs.read(ProcessorFiles({}, {})), num_workers=1)) as reader:
        yield reader


def _names():
    return [pytest.param(name, marks=[pytest.mark.full] if case.full else []) for name, case in CASES.items()]


@pytest.mark.parametrize("name", _names())
def test_each_file_has_its_answer(reader, name):
    case = CASES[name]
    source = Source("the part", case.make())
    if not isinstance(case.answer, Accepted):
        with pytest.raises(InvalidRequestError, match=f"^the part .*{case.answer.words}"):
            reader.decode(reader.measure([source]))
        return
    (image,) = reader.measure([source])
    width, height = image.size.shape[2], image.size.shape[1]
    assert (width, height) == (case.answer.width, case.answer.height)
    (segment,) = reader.decode([image])
    pixels = open_pixels(segment, image.size.shape)
    reader.give_back([segment])
    if case.answer.corner is not None:
        distance = np.abs(pixels[0, 0, 0].astype(int) - np.array(case.answer.corner)).max()
        assert distance <= case.answer.tolerance, pixels[0, 0, 0]


def test_turned_pictures_are_equal_upright(reader):
    found = []
    for orientation in range(1, 9):
        images = reader.measure([Source("x", CASES[f"jpeg turned {orientation}"].make())])
        (segment,) = reader.decode(images)
        found.append(open_pixels(segment, images[0].size.shape).astype(int))
        reader.give_back([segment])
    assert all(np.abs(pixels - found[0]).max() <= 6 for pixels in found)


def test_no_process_starts_but_the_workers(reader):
    with pytest.raises(InvalidRequestError):
        reader.measure([Source("x", CASES["eps"].make())])
    table = process_table()
    workers = [one for one in descendants(os.getpid(), table) if "images.worker" in _command(one.pid)]
    assert workers
    assert not [one for worker in workers for one in descendants(worker.pid, table)]


def _command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_worker_holds_nothing_and_is_limited():
    with contextlib.closing(_ended(Worker())) as kept:
        proc = Path(f"/proc/{kept.worker.pid}")
        environment = proc.joinpath("environ").read_bytes().split(b"\0")
        assert {one.partition(b"=")[0] for one in environment if one} <= {b"OPENBLAS_NUM_THREADS", b"LD_LIBRARY_PATH"}
        assert "NoNewPrivs:\t1" in proc.joinpath("status").read_text()
        limits = proc.joinpath("limits").read_text()
        assert "Max address space         1610612736" in limits
        assert "Max open files            32" in limits
        links = [os.readlink(one) for one in proc.joinpath("fd").iterdir()]
        assert sum(one.startswith("socket:") for one in links) == 1
        assert all(one.startswith(("socket:", "/dev/null")) for one in links)


class _ended:
    def __init__(self, worker):
        self.worker, self.close = worker, worker.end


def test_dead_and_slow_workers_are_replaced(monkeypatch):
    pids = []

    def dies(worker):
        pids.append(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        return worker.open(pools.Open(), picture(8, 8))

    def sleeps(worker):
        pids.append(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker.open(pools.Open(), picture(8, 8))

    def works(worker):
        pids.append(worker.pid)
        return worker.open(pools.Open(), picture(8, 8))

    monkeypatch.setattr(pools, "TASK_S", 1.0)
    with contextlib.closing(Pool(1)) as pool:
        for job in (dies, sleeps):
            with pytest.raises(InvalidRequestError, match="took a worker down"):
                pool.submit(job).result()
        assert pool.submit(works).result().width == 8
        assert pool.submit(works).result().width == 8
    assert len(set(pids[:3])) == 3
    assert pids[2] == pids[3]
    time.sleep(0.1)
    assert not Path(f"/proc/{pids[-1]}").exists()


def test_limits_of_a_request(reader):
    small = ImageReader(reader.family, limits=ImageLimits(num_images=2, file_bytes=500), num_workers=1)
    with contextlib.closing(small):
        with pytest.raises(InvalidRequestError, match=r"c is image 3 of 3; allowed: 2 a request"):
            small.measure([Source(name, picture(8, 8)) for name in "abc"])
        with pytest.raises(InvalidRequestError, match=r"a has \d+ bytes; allowed: 500"):
            small.measure([Source("a", picture(30, 30))])
    huge = CASES["7000x7000 of one colour"].make()
    with pytest.raises(InvalidRequestError, match="brings the request's images to 588000000 bytes"):
        reader.measure([Source(f"image {k}", huge) for k in range(4)])


PNG = base64.b64encode(picture(9, 9)).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PNG}",
        f"DATA:image/png;BASE64,{PNG}",
        f"  data:;base64,{PNG}",
        f"data:image/jpeg;charset=utf-8;base64,{PNG}",
        f"data:image/png;base64,{PNG.rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(PNG[k : k + 60] for k in range(0, len(PNG), 60)),
        f"data:image/png;base64, {PNG} ",
        f"data:image/png;base64,{PNG.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{PNG.replace('+', '%2B').replace('/', '%2f')}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in picture(9, 9)),
    ],
)
def test_data_urls(url):
    assert data_of_url(url, "url") == picture(9, 9)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "url is ''"),
        ("data:image/png;base64,", "url is empty"),
        ("data:image/png;base64,ab!d", "no base64"),
        ("data:image/png;base64,abcde", "no base64"),
        (f"data:image/png;base64,{'A' * (28 << 20)}", "has 22020096 bytes; allowed: 20971520"),
        ("data:image/png;base64" + PNG, "allowed: a data URL"),
        ("http://127.0.0.1/a.png", "an http URL, and this server fetches none"),
        ("HTTPS://a.b/c", "an https URL"),
        ("file:///etc/passwd", "allowed: a data URL"),
        ("/etc/passwd.png", "allowed: a data URL"),
        ("gopher://x", "allowed: a data URL"),
        ("x" * 10_000, r"\(10002 characters\)"),
    ],
)
def test_what_is_no_data_url(url, said):
    with pytest.raises(InvalidRequestError, match=said):
        data_of_url(url, "url")


GOOD = {"type": "image_url", "image_url": {"url": f"data:;base64,{PNG}"}}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url"}, r"content\[0\].image_url is None"),
        ({"type": "image_url", "image_url": None}, "image_url is None; allowed: a data URL"),
        ({"type": "image_url", "image_url": 7}, "image_url is 7; allowed: a data URL"),
        ({"type": "image_url", "image_url": []}, r"image_url is \[\]"),
        ({"type": "image_url", "image_url": {}}, "image_url.url is None"),
        ({**GOOD, "extra": 1}, "has 'extra'; allowed: cache_control, detail, file_id, image_url"),
        ({"type": "image_url", "image_url": {**GOOD["image_url"], "x": 1}}, "image_url has 'x'; allowed: detail"),
        ({"type": "image_url", "image_url": {**GOOD["image_url"], "detail": "max"}}, "detail is 'max'; allowed: auto"),
        ({**GOOD, "uuid": 7}, "uuid is 7"),
        ({"type": "image_url", "uuid": "a"}, "uuid is given without an image"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id is 'file-1'"),
        ({"type": "image", "index": 0}, "source.type is None; allowed: base64, url, file"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "this server has no video"),
        ({"type": "input_audio"}, "this server has no audio"),
        ({"type": "image_embeds", "image_embeds": "x"}, "vectors of clients"),
        ({"type": "file", "file": {}}, "render their pages"),
        ({"type": "image_pil", "image_pil": "x"}, "only in the process of `LLM`"),
    ],
)
def test_parts_are_refused_by_name_and_reason(part, said):
    with pytest.raises(InvalidRequestError, match=said):
        SourceLoader(()).load(take_images([{"role": "user", "content": [part]}])[1])


def test_forms_of_parts_and_their_order():
    url = f"data:;base64,{PNG}"
    forms = [
        GOOD,
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
        {"type": "input_image", "image_url": url, "detail": "low"},
        {**GOOD, "uuid": None, "cache_control": {"type": "ephemeral"}},
    ]
    texts = [{"type": "text", "text": str(k)} for k in range(5)]
    content = [one for pair in zip(texts, forms, strict=True) for one in pair]
    messages = [{"role": role, "content": content} for role in ("user", "assistant", "system", "tool")]
    found, sources = take_images(messages)
    assert len(sources) == 20
    assert [source.low_detail for source in sources[:5]] == [False, False, False, True, False]
    assert found[3]["content"] == [one for text in texts for one in (text, {"type": "image"})]
    with pytest.raises(InvalidRequestError, match=r"messages\[5\].content\[0\] is image 101; allowed: 100 a request"):
        take_images([*messages, *({"role": "user", "content": [GOOD] * count} for count in (80, 1))])
    empty = [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]
    assert take_images(empty) == (empty, [])
