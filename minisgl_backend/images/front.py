"""All that a front does with one model's images: from parts and bytes to prompts with contents."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from minisgl_backend.config import EngineConfig, hosts_of
from minisgl_backend.errors import ConfigError
from minisgl_backend.images.families import family_of, why_blind
from minisgl_backend.images.loading import SourceLoader
from minisgl_backend.images.parts import Source, check_number
from minisgl_backend.images.placeholders import ImagePrompt, Placeholders, PromptTokenizer
from minisgl_backend.images.reader import ImageLimits, ImageReader, Measured
from minisgl_backend.images.segments import SHARED, shared_bytes
from minisgl_backend.images.sizes import Size
from minisgl_backend.request import Content, SamplingParams

log = logging.getLogger(__name__)

_LEAST_SHARED_MIB = 256  # an image of 50 megapixels takes 150


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt whose images are measured, not decoded."""

    prompt: ImagePrompt
    images: tuple[Measured, ...]

    @property
    def counted(self) -> str:
        """Tokens of text and of each image, for errors."""
        images = [span.length for span in self.prompt.spans]
        if not images:
            return ""
        text = len(self.prompt.token_ids) - sum(images)
        return (
            f"{text} of text, {' + '.join(map(str, images))} of images; `detail: low` or mm_processor_kwargs make "
            "images smaller"
        )


class ImageFront:
    """Of one model. Thread-safe; processes and shared memory begin with the first image."""

    def __init__(
        self,
        model_dir: str | Path,
        tokenizer: PromptTokenizer,
        *,
        max_image_tokens: int | None = None,
        limits: ImageLimits | None = None,
        num_workers: int | None = None,
        cache_bytes: int = 1 << 30,
        media_domains: Sequence[str] = (),
    ) -> None:
        """media_domains: as `SourceLoader`'s. Raises ConfigError if the folder's images are not served."""
        family = family_of(model_dir)
        if max_image_tokens is not None:
            family = family.limited(max_image_tokens)
        self._placeholders = Placeholders(tokenizer, family)
        self._loader = SourceLoader(media_domains)
        self._reader = ImageReader(family, limits=limits, num_workers=num_workers, cache_bytes=cache_bytes)

    def close(self) -> None:
        """Safe to call twice."""
        self._loader.close()
        self._reader.close()

    @property
    def max_images(self) -> int:
        """Of a request."""
        return self._reader.limits.num_images

    @property
    def max_fetching(self) -> int:
        """Calls of `load` that wait for URLs at a time; more are refused."""
        return self._loader.max_fetching

    def load(self, sources: Sequence[Source]) -> list[Source]:
        """The same with the data of their URLs. Raises InvalidRequestError, CapacityError."""
        check_number(sources, self.max_images)
        return self._loader.load(sources)

    def are_written_in(self, value: Any) -> bool:
        """Whether a text, or a JSON value's texts, hold the name of a token of the family's own: `of_chat` then keeps
        them text, also without images."""
        return self._placeholders.are_written_in(value)

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sources: Sequence[Source],
        template: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> SeenPrompt:
        """`messages`: with {"type": "image"} for each of the sources. Raises InvalidRequestError, CapacityError."""
        images = self._reader.measure(sources)
        return SeenPrompt(
            self._placeholders.of_chat(messages, _sizes(images), template, add_special_tokens=add_special_tokens),
            tuple(images),
        )

    def of_text(self, name: str, text: str, sources: Sequence[Source], *, add_special_tokens: bool) -> SeenPrompt:
        """`text`: with the family's slot for each of the sources. Raises as `of_chat`, with `name` for the text."""
        images = self._reader.measure(sources)
        prompt = self._placeholders.of_text(name, text, _sizes(images), add_special_tokens=add_special_tokens)
        return SeenPrompt(prompt, tuple(images))

    def of_ids(self, name: str, token_ids: Sequence[int], sources: Sequence[Source]) -> SeenPrompt:
        """`token_ids`: with a slot for each of the sources, or their own tokens. Raises as `of_chat`."""
        images = self._reader.measure(sources)
        return SeenPrompt(self._placeholders.of_ids(name, token_ids, _sizes(images)), tuple(images))

    def masking(self, params: SamplingParams) -> SamplingParams:
        """For an answer about images: the family's own tokens are never sampled, whatever they count in penalties."""
        words = (*params.bad_words_token_ids, *((token,) for token in self._placeholders.own_ids))
        return msgspec.structs.replace(params, bad_words_token_ids=tuple(dict.fromkeys(words)))

    def contents(self, seen: SeenPrompt) -> tuple[Content, ...]:
        """Decodes. The segments are the caller's: `give_back`, or whoever takes them (`SegmentFolder.take`). Raises
        InvalidRequestError, CapacityError."""
        names = self._reader.decode(seen.images)
        return tuple(
            Content(
                start=span.start,
                length=span.length,
                digest=image.digest,
                grid=image.size.grid,
                runs=span.runs,
                pixels=name,
                shape=image.size.shape,
            )
            for span, image, name in zip(seen.prompt.spans, seen.images, names, strict=True)
        )

    def give_back(self, contents: Sequence[Content]) -> None:
        """Removes the contents' segments."""
        self._reader.give_back([content.pixels for content in contents])


def open_front(
    model_dir: str | Path, tokenizer: PromptTokenizer, config: EngineConfig, *, sees: bool, why_not: str
) -> tuple[ImageFront | None, str]:
    """The front of a model that sees, and ""; else None, and why its images are refused, if there is a reason beside
    that it has no eyes. Its texts are served even so. Raises ConfigError for `max_image_tokens`."""
    if not sees:
        return None, why_blind(model_dir, why_not)
    try:
        return (
            ImageFront(
                model_dir,
                tokenizer,
                max_image_tokens=config.max_image_tokens,
                limits=ImageLimits(num_images=config.max_images),
                num_workers=config.image_workers,
                cache_bytes=_cache_bytes(config.image_cache_mib),
                media_domains=hosts_of(config.media_domains),
            ),
            "",
        )
    except ConfigError as error:
        if str(error).startswith("max_image_tokens"):
            raise
        log.warning("images are refused: %s", error)
        return None, str(error)


def scarce_memory(cache_mib: int) -> str:
    """What is too small for decoded images, and the remedy; "": nothing. A container of Docker has 64 MiB."""
    room = shared_bytes() >> 20
    if room >= max(cache_mib, _LEAST_SHARED_MIB):
        return ""
    return (
        f"{SHARED} has {room} MiB for decoded images, of which image_cache_mib alone is {cache_mib}: large ones may "
        "be refused; in Docker: --shm-size 2g, in Kubernetes a memory volume there"
    )


def _cache_bytes(cache_mib: int) -> int:
    """What is kept leaves half of the shared memory to requests."""
    if scarce := scarce_memory(cache_mib):
        log.warning("%s", scarce)
        return min(cache_mib << 20, shared_bytes() // 2)
    return cache_mib << 20


def _sizes(images: Sequence[Measured]) -> list[Size]:
    return [image.size for image in images]
