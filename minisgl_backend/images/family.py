"""What differs between families that see: sizes, the texts around images, and what a request may change."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.processor_files import ProcessorFiles
from minisgl_backend.images.sizes import Size

Self_ = TypeVar("Self_", bound="Family")

NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)  # Pillow's numbers, as processors' files have them


@dataclass(frozen=True)
class Family(ABC):
    """One model's images. Values come from the folder's files; a request gets a changed copy (`changed`).

    Every field changes pixels or tokens: all of them are part of an image's digest.
    """

    slot: str  # the text that stands for one image in a prompt, as chat templates write it
    vector: str  # the token whose embedding an image's vector replaces
    # Tokens' texts that only templates and expansions make: in a user's text they are ordinary text.
    reserved: tuple[str, ...]
    resample: int  # Pillow's filter

    OPTIONS: ClassVar[tuple[str, ...]] = ()  # of `mm_processor_kwargs`

    @classmethod
    @abstractmethod
    def read(cls: type[Self_], files: ProcessorFiles) -> Self_:
        """Raises ConfigError for what is not served."""

    @abstractmethod
    def size(self, width: int, height: int) -> Size:
        """What an upright image of that width and height becomes."""

    @abstractmethod
    def limited(self: Self_, max_tokens: int) -> Self_:
        """With at most that many vectors an image, as far as the family's sizes allow it."""

    def low_detail(self: Self_) -> Self_:
        """As `detail: low` asks: unchanged where all images have one size."""
        return self

    def changed(self: Self_, options: Mapping[str, Any]) -> Self_:
        """With a request's `mm_processor_kwargs`, which never go beyond this one. Raises InvalidRequestError."""
        if not options:
            return self
        changes: dict[str, Any] = {}
        for name, value in options.items():
            known = self._changes(name, value)
            if known is None:
                allowed = ", ".join(self.OPTIONS) or "none, with this model"
                raise InvalidRequestError(f"mm_processor_kwargs has {name!r}; allowed: {allowed}")
            changes |= known
        return dataclasses.replace(self, **changes)

    def _changes(self, name: str, value: Any) -> dict[str, Any] | None:
        """The fields that an option of OPTIONS changes, with their values; None: it is no option of this family."""
        return None

    @property
    def fingerprint(self) -> str:
        """Differs for all that makes other pixels or other tokens."""
        return repr(self)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Of an option. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"mm_processor_kwargs.{name} is {value!r:.60}; allowed: a whole number from {least}")
    return value
