"""Pictures of a benchmark's requests: no two are equal, and they are about as large as photos."""

from __future__ import annotations

import base64
import importlib.util
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .workload import Load, Question

FORMATS = ("jpeg", "png")
_MAX_COUNT, _MAX_SIDE = 100, 8192
_RESOLUTIONS = {"360p": (640, 360), "720p": (1280, 720), "1080p": (1920, 1080), "4k": (3840, 2160)}
_PATCH = (
    8  # pixels of one colour of the noise, before it is smoothed: files of a tenth of a byte to half a byte a pixel
)
_FRESH = random.SystemRandom()


@dataclass(frozen=True)
class Pictures:
    """Those of each request."""

    count: int
    width: int
    height: int
    format: str

    @classmethod
    def parse(cls, count: int, resolution: str, kind: str) -> Pictures:
        """`resolution`: WIDTHxHEIGHT, or a name as 1080p. Raises ValueError, which names the option."""
        match = re.fullmatch(r"(\d+)x(\d+)", resolution.strip().lower())
        width, height = (int(match[1]), int(match[2])) if match else _RESOLUTIONS.get(resolution.lower(), (0, 0))
        if not (1 <= width <= _MAX_SIDE and 1 <= height <= _MAX_SIDE):
            allowed = f"WIDTHxHEIGHT of 1 to {_MAX_SIDE} pixels, or {', '.join(_RESOLUTIONS)}"
            raise ValueError(f"--image-resolution is {resolution!r}; allowed: {allowed}")
        if not 0 <= count <= _MAX_COUNT:
            raise ValueError(f"--image-count is {count}; allowed: 0 to {_MAX_COUNT}")
        if kind not in FORMATS:
            raise ValueError(f"--image-format is {kind!r}; allowed: {', '.join(FORMATS)}")
        if count and importlib.util.find_spec("PIL") is None:
            raise ValueError("--image-count needs Pillow: pip install 'minisgl-backend[images]'")
        return cls(count, width, height, kind)

    def added(self, load: Load, on_each: Callable[[], None] = lambda: None) -> Load:
        """The load with pictures in each of its requests; `on_each` is called after one request's."""
        if not self.count:
            return load
        found = []
        for question in load.questions:
            found.append(self._of(question))
            on_each()
        return replace(load, questions=found)

    def _of(self, question: Question) -> Question:
        return replace(question, images=tuple(self._url() for _ in range(self.count)))

    def _url(self) -> str:
        from PIL import Image

        size = -(-self.width // _PATCH), -(-self.height // _PATCH)
        noise = Image.frombytes("RGB", size, _FRESH.randbytes(size[0] * size[1] * 3))
        file = io.BytesIO()
        noise.resize((self.width, self.height), Image.Resampling.BICUBIC).save(file, self.format.upper())
        return f"data:image/{self.format};base64,{base64.b64encode(file.getvalue()).decode()}"
