"""Images a second in a front: JPEG files of photographs' statistics, decoded and resized for Qwen3-VL's processor.

`python -m benchmarks.images --json` measures with one and with two workers; nothing is kept between images. A core's
figure counts the seconds that workers computed, however many other programs run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.images.families.qwen_vl import QwenVL
from minisgl_backend.images.parts import Source
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.reader import ImageReader
from minisgl_backend.process.processes import descendants, process_table

SIZES = {"512x512": (512, 512), "1024x1024": (1024, 1024), "1080p": (1920, 1080), "12 MP": (4032, 3024)}
QWEN3_VL = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1080p"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--images", type=int, default=40, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = []
    for size in options.sizes:
        files = [photograph(*SIZES[size], seed) for seed in range(min(options.images, 8))]
        for workers in options.workers:
            rounds = measured(files, workers, options.images, options.rounds)
            found.append({"size": size, "workers": workers, **rounds})
            if not options.json:
                print(", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    if options.json:
        print(json.dumps(found))


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG of quality 90 whose size is that of a photograph."""
    from PIL import Image  # what measures is a client

    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def measured(files: Sequence[bytes], workers: int, count: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds."""
    family = QwenVL.read(ProcessorFiles({}, QWEN3_VL))
    rates, per_core = [], []
    with contextlib.closing(ImageReader(family, num_workers=workers, cache_bytes=1 << 30)) as reader:
        _read(reader, files, "warm", workers * 2)
        for number in range(rounds):
            began, before = time.perf_counter(), _worker_seconds()
            _read(reader, files, str(number), count)
            seconds = time.perf_counter() - began
            rates.append(count / seconds)
            per_core.append(count / (_worker_seconds() - before))
    return {
        "images_s": round(statistics.median(rates), 1),
        "images_core_s": round(statistics.median(per_core), 1),
        "load": round(os.getloadavg()[0], 1),
    }


def _read(reader: ImageReader, files: Sequence[bytes], name: str, count: int) -> None:
    """New images each time: their salts differ."""
    sources = [Source("x", files[k % len(files)], salt=f"{name} {k}") for k in range(count)]
    for first in range(0, count, 8):
        images = reader.measure(sources[first : first + 8])
        reader.give_back(reader.decode(images))


def _worker_seconds() -> float:
    """On processors, of all workers."""
    ticks = 0
    for process in descendants(os.getpid(), process_table()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
