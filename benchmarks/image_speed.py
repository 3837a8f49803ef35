"""Images on a GPU: towers, the time to a first token, streams beside photos, and text on models that see.

    python -m benchmarks.image_speed --only tower,first,beside,text [--model qwen3-vl-8b]

Weights and pixels are random, the engine runs in this process. Where Pillow is installed, an image begins as a JPEG
whose decoding is told apart; else as pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import MODELS, _decode_ms, _driver
from benchmarks.model_shapes import make_folder
from minisgl_backend.images.families.qwen_vl import QwenVL
from minisgl_backend.images.processor_files import read_processor
from minisgl_backend.images.segments import SegmentFolder
from minisgl_backend.images.sizes import Size
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import Content

SIZES = {"448x448": (448, 448), "720p": (1280, 720), "1080p": (1920, 1080), "12 MP": (4032, 3024)}
_BEFORE, _BEHIND = 16, 48  # tokens of text around an image
_STREAMS, _STREAM_TOKENS = 16, 400


class Photos:
    """Images of one model for prompts, each new to all caches unless told otherwise."""

    def __init__(self, model: str) -> None:
        folder = make_folder(model, MODELS)
        self.family = QwenVL.read(read_processor(folder))
        self.token = json.loads((folder / "config.json").read_text())["image_token_id"]
        self._folder = SegmentFolder()
        self._rng = np.random.default_rng(0)

    def close(self) -> None:
        self._folder.close()

    def sized(self, size: str, max_tokens: int | None = None) -> Size:
        family = self.family if max_tokens is None else self.family.limited(max_tokens)
        return family.size(*SIZES[size])

    def prompt(self, size: Size, seed: int) -> tuple[list[int], tuple[Content, ...]]:
        """An image between texts; the same for equal seeds."""
        rng = random.Random(f"{seed} {size.shape}")
        before, behind = ([rng.randint(0, 10000) for _ in range(count)] for count in (_BEFORE, _BEHIND))
        name = self._folder.new_name()
        pixels = np.random.default_rng(seed).integers(0, 256, size.shape, dtype=np.uint8)
        self._folder.path(name).write_bytes(pixels.tobytes())
        content = Content(
            start=len(before),
            length=size.num_vectors,
            digest=hashlib.sha256(f"{seed} {size.shape}".encode()).digest(),
            grid=size.grid,
            pixels=name,
            shape=size.shape,
        )
        return [*before, *[self.token] * size.num_vectors, *behind], (content,)


def tower(model: str, sizes: Sequence[str]) -> dict[str, Any]:
    """Milliseconds of the encoder alone, and its floors."""
    from benchmarks.floors import Floors
    from benchmarks.limits import Limits
    from minisgl_backend.encoders.build import build_encoder

    folder, device = make_folder(model, MODELS), torch.device("cuda")
    config = ModelConfig.load(folder)
    assert config.encoder is not None, config.why_no_images
    encoder = build_encoder(
        config.encoder, folder, device=device, dtype=torch.bfloat16, model=model, dummy_weights=True
    )
    photos = Photos(model)
    limits = Limits.measured(device)
    floors = Floors(config, limits)
    found: dict[str, Any] = {"gemm_tflop_s": round(limits.flop_per_s / 1e12)}
    with torch.inference_mode(), contextlib.closing(photos):
        for name in sizes:
            size = photos.sized(name)
            pixels = torch.randint(0, 256, size.shape, dtype=torch.uint8, device=device)
            ms = _device_ms(lambda: encoder.encode(pixels, size.grid))
            floor = floors.encoder_s(size.grid[1] * size.grid[2])
            found |= {f"{name}_ms": ms, f"{name}_floor_ms": round(1000 * floor, 1)}
    return found


def first(driver: Any, model: str, size: str, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds from submitting an image's prompt to its first token, alone; and with the same image again: the
    whole prompt again, and in another prompt."""
    photos = Photos(model)
    taken: dict[str, list[float]] = {"first": [], "again": [], "other_chat": []}
    with contextlib.closing(photos):
        shape = photos.sized(size)
        for seed in range(repeats + 2):
            tokens, contents = photos.prompt(shape, seed)
            other = [*range(100, 100 + _BEFORE), *tokens[_BEFORE:]]
            for name, prompt in (("first", tokens), ("again", tokens), ("other_chat", other)):
                taken[name].append(_first_ms(driver, prompt, contents))
    found: dict[str, Any] = {"size": size, "new_shape_ms": round(taken["first"][0], 1)}
    found |= {f"{name}_ms": round(statistics.median(values[2:]), 1) for name, values in taken.items()}
    return {"tokens": shape.num_vectors + _BEFORE + _BEHIND, **found, **_host_ms(photos.family, size)}


def _first_ms(driver: Any, prompt: list[int], contents: tuple[Content, ...]) -> float:
    uid = driver.submit(prompt, 1, contents=contents)
    driver.run()
    timeline = driver.timelines[uid]
    return 1000 * float(timeline.tokens[0] - timeline.submitted)


def _host_ms(family: QwenVL, size: str) -> dict[str, float]:
    """Milliseconds in a front, alone: from the JPEG's bytes to a segment of pixels; nothing without Pillow."""
    if importlib.util.find_spec("PIL") is None:
        return {}
    from benchmarks.images import photograph
    from minisgl_backend.images.parts import Source
    from minisgl_backend.images.reader import ImageReader

    taken = []
    with contextlib.closing(ImageReader(family, num_workers=2)) as reader:
        for seed in range(6):
            source = Source("x", photograph(*SIZES[size], seed))
            began = time.perf_counter()
            reader.give_back(reader.decode(reader.measure([source])))
            taken.append(1000 * (time.perf_counter() - began))
    return {"host_ms": round(statistics.median(taken[1:]), 1)}


def beside(
    driver: Any, model: str, every_s: float = 4.0, max_tokens: int | None = None, count: int = 4, size: str = "12 MP"
) -> dict[str, Any]:
    """Milliseconds between tokens of text streams, 99 of 100 at most, without images and with one every so many
    seconds; and the slowest first token of an image's prompt."""
    photos = Photos(model)
    found: dict[str, Any] = {"max_image_tokens": max_tokens, "every_s": every_s}
    with contextlib.closing(photos):
        shape = photos.sized(size, max_tokens)
        prompts = [photos.prompt(shape, 1000 + k) for k in range(count + 1)]
        for name, given in (("warm", prompts[:1]), ("alone", []), ("with", prompts[1:])):
            gaps, firsts = _gaps(driver, given, every_s)
            if name != "warm":
                found[f"{name}_p99_ms"] = round(float(np.percentile(gaps, 99)), 2)
                found[f"{name}_most_ms"] = round(max(gaps), 1)
            if name == "with":
                found["image_first_s"] = round(max(firsts), 2)
    found["ratio"] = round(found["with_p99_ms"] / found["alone_p99_ms"], 2)
    return found


def _gaps(driver: Any, prompts: list[Any], every_s: float) -> tuple[list[float], list[float]]:
    """Milliseconds between the streams' tokens, and seconds to the first tokens of the images' prompts."""
    driver.clear()
    rng = random.Random(len(prompts))
    streams = [
        driver.submit([rng.randint(0, 10000) for _ in range(200)], _STREAM_TOKENS + 100) for _ in range(_STREAMS)
    ]
    while any(len(driver.timelines[uid].tokens) < 20 for uid in streams):
        driver.step()
    begin = time.perf_counter()
    seconds = max(every_s * len(prompts), 3.0)
    waiting = list(prompts)
    images: list[int] = []
    while time.perf_counter() - begin < seconds or any(not driver.timelines[uid].done for uid in images):
        now = time.perf_counter() - begin
        if waiting and now >= every_s * (len(prompts) - len(waiting)):
            tokens, contents = waiting.pop(0)
            images.append(driver.submit(tokens, 1, contents=contents))
        for index, uid in enumerate(streams):
            if driver.timelines[uid].done:  # another stream in its place; its own first token counts for nothing
                streams[index] = driver.submit([rng.randint(0, 10000) for _ in range(200)], _STREAM_TOKENS)
        driver.step()
    gaps = []
    for uid, timeline in driver.timelines.items():
        if uid not in images:
            stamps = [stamp for stamp in timeline.tokens if stamp >= begin]
            gaps += [1000 * (b - a) for a, b in itertools.pairwise(stamps)]
    firsts = [driver.timelines[uid].tokens[0] - driver.timelines[uid].submitted for uid in images]
    driver.run()
    return gaps, firsts


def text(driver: Any, batches: Sequence[int] = (1, 8, 64)) -> dict[str, Any]:
    """Milliseconds of decode steps of text, and the kernels that such a step launches."""
    found: dict[str, Any] = {}
    for batch in batches:
        found[f"bs{batch}_ms"] = _decode_ms(driver, batch, 1024)
        found[f"bs{batch}_kernels"] = _kernels(driver, batch)
    return found


def _kernels(driver: Any, batch: int, steps: int = 8) -> float:
    """Of a decode step."""
    driver.clear()
    for seed in range(batch):
        driver.submit([seed] * 64, 4 * steps + 40)
    for _ in range(20 + batch // 8):
        driver.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            driver.step()
        torch.cuda.synchronize()
    count = sum(one.device_type == torch.autograd.DeviceType.CUDA for one in profiler.events())
    driver.run()
    return count / steps


def _device_ms(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    call()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(statistics.median(taken), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="tower,first,beside,text")
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["720p"], help="of `first`")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between the images of `beside`")
    parser.add_argument("--max-image-tokens", type=int, help="of `beside`: larger images are scaled down")
    options = parser.parse_args(arguments)
    asked = options.only.split(",")
    if unknown := set(asked) - {"tower", "first", "beside", "text"}:
        raise SystemExit(f"--only has {', '.join(sorted(unknown))}; allowed: tower, first, beside, text")
    if "tower" in asked:
        _show("tower", options.model, tower(options.model, ["448x448", "720p", "1080p"]))
    if asked == ["tower"]:
        return
    driver = _driver(options.model)
    for size in options.sizes if "first" in asked else ():
        _show("first", options.model, first(driver, options.model, size))
    if "beside" in asked:
        _show("beside", options.model, beside(driver, options.model, options.every, options.max_image_tokens))
    if "text" in asked:
        _show("text", options.model, text(driver))
    driver.close()


def _show(part: str, model: str, found: dict[str, Any]) -> None:
    print(json.dumps({"model": model, "part": part, **found}), flush=True)


if __name__ == "__main__":
    main()
