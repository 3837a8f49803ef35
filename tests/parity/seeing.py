"""An engine that is asked about images, and what transformers says of the same prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl_backend.cache.content_ids import content_ids
from minisgl_backend.cache.encoder_books import EncoderBooks
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import Engine, build_engine
from minisgl_backend.environment import Environment
from minisgl_backend.images.segments import SegmentFolder, remove_segment
from minisgl_backend.request import Content, Request, SamplingParams
from minisgl_backend.step import Logprobs
from tests.parity.vision_checkpoints import FAMILIES, inputs

PLACEHOLDER = 319  # the last token of the vocabulary


class Image(NamedTuple):
    """In a prompt, of transformers' `image_token_id` or of ours."""

    pixels: torch.Tensor  # uint8 [1, height, width, 3]


Prompt = Sequence[int | Image]


def tokens_of(name: str, image: Image) -> int:
    return FAMILIES[name].tokens(*image.pixels.shape[:3])


def expanded(name: str, prompt: Prompt) -> tuple[list[int], list[tuple[int, Image]]]:
    """Token ids, and where images begin."""
    tokens: list[int] = []
    images = []
    for part in prompt:
        if isinstance(part, Image):
            images.append((len(tokens), part))
            tokens += [PLACEHOLDER] * tokens_of(name, part)
        else:
            tokens.append(part)
    return tokens, images


class Said(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class Seeing:
    """One engine."""

    def __init__(self, name: str, engine: Engine, folder: SegmentFolder) -> None:
        self.name, self.core, self._folder = name, engine.core, folder
        self._uids = 0
        self.errors: dict[int, str] = {}  # by uid, of requests that `ask` was not asked about

    @property
    def books(self) -> EncoderBooks:
        images = self.core._scheduler._running.images
        assert images is not None
        return images.books

    @property
    def held_bytes(self) -> int:
        """What the runner holds."""
        vectors = self.core._runner.vectors
        assert vectors is not None
        assert not vectors._states
        return vectors.num_bytes

    def forget_pages_from(self, prompt: Prompt, length: int) -> None:
        """Leaves the first `length` tokens of a prompt in the prefix cache, of pages of one token."""
        kv = self.core._scheduler._running.kv
        tokens, _ = expanded(self.name, prompt)
        request = self.request(prompt)
        ids = content_ids(np.array(tokens, dtype=np.int32), request.contents)
        kept = kv.match(ids[:length])
        assert kept.num_pages == length
        kv._pool.give_back(kv._cache.evict(kv._cache.num_evictable))
        kv.unmatch(kept)

    def remove_pixels(self, request: Request) -> None:
        for content in request.contents:
            remove_segment(content.pixels)

    def request(self, prompt: Prompt, **params: Any) -> Request:
        tokens, images = expanded(self.name, prompt)
        contents = []
        for start, image in images:
            pixels = image.pixels.numpy()
            name = self._folder.new_name()
            self._folder.path(name).write_bytes(pixels.tobytes())
            contents.append(
                Content(
                    start=start,
                    length=tokens_of(self.name, image),
                    digest=hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).digest(),
                    grid=FAMILIES[self.name].grid(*pixels.shape[:3]),
                    pixels=name,
                    shape=pixels.shape,
                )
            )
        uid, self._uids = self._uids, self._uids + 64
        values = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": 0, **params}
        return Request(
            uid=uid,
            token_ids=np.array(tokens, dtype="<i4").tobytes(),
            params=SamplingParams(**values),
            contents=tuple(contents),
        )

    def ask(self, *requests: Request) -> list[Said]:
        """What each says, of requests that come together."""
        for request in requests:
            self.core.submit(request)
        said = {one.uid + k: Said([], []) for one in requests for k in range(one.params.n)}
        going = set(said)
        while going:
            assert self.core.step(), "it goes on while requests do"
            assert not self.core.take_rejected()
            outputs = self.core.drain_outputs()
            if outputs is None:
                continue
            for index, uid in enumerate(outputs.uids.tolist()):
                detail = outputs.details.get(index)
                if uid not in said:
                    self.errors[uid] = "" if detail is None else detail.error
                    continue
                assert detail is None or not detail.error, detail
                if outputs.token_ids[index] >= 0:
                    said[uid].tokens.append(int(outputs.token_ids[index]))
                    logprobs: Logprobs | None = None if detail is None else detail.logprobs
                    said[uid].logprobs.append(np.nan if logprobs is None else logprobs.logprob)
                if outputs.reasons[index]:
                    going.discard(uid)
        self.core._scheduler.check()
        return list(said.values())


@contextmanager
def seeing(name: str, folder: Path, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Seeing]:
    """An engine on the CPU in float32."""
    values = {
        "model": str(folder),
        "dtype": "float32",
        "page_size": 4,
        "num_pages": 200,
        "max_running_requests": 4,
        "encoder_cache_mib": 1,
        **options,
    }
    segments = SegmentFolder()
    engine = build_engine(EngineConfig(**values), Environment.read(environment or {}))
    try:
        yield Seeing(name, engine, segments)
    finally:
        engine.close()
        segments.close()


@torch.inference_mode()
def reference(name: str, model: Any, prompt: Prompt, max_tokens: int = 5) -> Said:
    """Greedily, without a cache."""
    tokens, images = expanded(name, prompt)
    length = len(tokens)
    more: dict[str, Any] = {}
    for _, image in images:
        for key, value in inputs(name, image.pixels).items():
            more[key] = torch.cat([more[key], value]) if key in more else value
    model.config.image_token_id = PLACEHOLDER
    model.model.config.image_token_id = PLACEHOLDER
    said = Said([], [])
    for _ in range(max_tokens):
        ids = torch.tensor([tokens])
        types = torch.zeros_like(ids)
        types[0, :length] = (ids[0, :length] == PLACEHOLDER).int()
        extra = {"mm_token_type_ids": types} if name.startswith(("qwen", "glm", "gemma4")) else {}
        if name == "gemma3":
            extra = {"token_type_ids": types}
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more, **extra)
        logprobs = found.logits[0, -1].log_softmax(-1)
        token = int(logprobs.argmax())
        said.tokens.append(token)
        said.logprobs.append(float(logprobs[token]))
        tokens.append(token)
    return said
