"""Where images stand in a prompt: from one slot an image to the tokens whose embeddings its vectors replace.

Slots come from a chat template's own structure, or from a prompt's text or ids. What a user writes in a message is
text: nothing is found by searching rendered texts or ids for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.family import Family
from minisgl_backend.images.parts import IMAGE
from minisgl_backend.images.sizes import Size

Layout = tuple[str | int, ...]  # as `Size.layout`


class PrivateTokens(Protocol):
    """Of the model's tokenizer: the family's tokens by names that no client can write (text/private_tokens.py)."""

    marker: str

    def named(self, text: str) -> str: ...
    def occurs_in(self, text: str) -> bool: ...
    def escaped(self, value: Any) -> Any: ...
    def unescaped(self, text: str) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def ids(self, texts: Sequence[str]) -> list[int | None]: ...


class PromptTokenizer(Protocol):
    """What is needed of text/tokenizer.py."""

    def render_images(self, messages: Sequence[Mapping[str, Any]], /, **template_arguments: Any) -> str: ...
    def private_tokens(self, texts: Sequence[str], model: str) -> PrivateTokens: ...


@dataclass(frozen=True)
class Span:
    """Where an image's tokens are in the prompt, from the first to behind the last that has a vector."""

    start: int
    length: int
    runs: tuple[int, ...]  # as `request.Content.runs`


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with its images' tokens."""

    text: str  # with one slot for each image, as a client may see it; "" of ids
    token_ids: Int32Array
    spans: tuple[Span, ...]  # in the order of the images

    @property
    def num_image_tokens(self) -> int:
        return sum(span.length for span in self.spans)


class Placeholders:
    """Of one model. Thread-safe."""

    def __init__(self, tokenizer: PromptTokenizer, family: Family) -> None:
        """Raises ConfigError if the tokenizer lacks the family's tokens."""
        self._tokenizer = tokenizer
        self._slot = family.slot
        self._tokens = tokenizer.private_tokens(family.reserved, family.vector)
        vector, slot = self._tokens.ids((family.vector, family.slot))
        if vector is None or slot is None:
            missing = family.vector if vector is None else family.slot
            raise ConfigError(f"the tokenizer has no token {missing!r}, which stands for images of this model")
        self._vector, self._slot_id = vector, slot
        own = self._tokens.ids((family.vector, *family.reserved))
        # Tokens that mean nothing in an answer.
        self.own_ids = tuple(dict.fromkeys(token for token in own if token is not None and token >= 0))

    def are_written_in(self, value: Any) -> bool:
        """Whether a text, or the texts of a JSON value, hold the usual name of one of the family's tokens."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        return self._tokens.occurs_in(text)

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sizes: Sequence[Size],
        template: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> ImagePrompt:
        """`messages`: with content parts {"type": "image"} in the images' order. Where the template shows none of a
        tool's message, they stand at the beginning of the user's next one. Raises InvalidRequestError."""
        moved = images_behind_tools(messages)
        try:
            return self._of_chat(messages, sizes, template, add_special_tokens)
        except InvalidRequestError:
            if moved is None:
                raise
        return self._of_chat(moved, sizes, template, add_special_tokens)

    def _of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sizes: Sequence[Size],
        template: Mapping[str, Any],
        add_special_tokens: bool,
    ) -> ImagePrompt:
        escaped = [self._tokens.escaped(message) for message in messages]
        try:
            rendered = self._tokenizer.render_images(escaped, **self._tokens.escaped(template))
        except InvalidRequestError as error:
            raise InvalidRequestError(self._tokens.unescaped(str(error))) from None
        pieces = self._tokens.named(rendered).split(self._tokens.named(self._slot))
        if len(pieces) - 1 != len(sizes):
            raise InvalidRequestError(
                f"messages: the chat template shows {len(pieces) - 1} of {len(sizes)} images; allowed: images in "
                "messages of a role whose content parts it shows, mostly `user`"
            )
        pieces = [self._tokens.unescaped(piece) for piece in pieces]
        return self._expanded(self._tokens.unescaped(rendered), pieces, sizes, add_special_tokens)

    def of_text(self, name: str, text: str, sizes: Sequence[Size], *, add_special_tokens: bool = True) -> ImagePrompt:
        """`text`: with the slots of the images. Raises InvalidRequestError, with `name` for the text."""
        pieces = self._tokens.named(text).split(self._tokens.named(self._slot))
        self._check_number(name, len(pieces) - 1, len(sizes))
        return self._expanded(text, pieces, sizes, add_special_tokens)

    def of_ids(self, name: str, token_ids: Sequence[int], sizes: Sequence[Size]) -> ImagePrompt:
        """`token_ids`: one slot for each image, or each image's own tokens already. Raises InvalidRequestError."""
        own, given = [self._ids_of(size) for size in sizes], list(token_ids)
        found = self._marked(given, own)
        if found is None:
            slots = given.count(self._slot_id)
            if slots != len(sizes) or (self._slot_id != self._vector and self._vector in given):
                raise InvalidRequestError(
                    f"{name} has token {self._slot_id} {slots} times for {len(sizes)} images; allowed: once for each "
                    f"image, or each image's own tokens, here {', '.join(str(len(ids)) for ids in own)} of them"
                )
            parts = iter(own)
            found = [one for token in given for one in (next(parts) if token == self._slot_id else (token,))]
        return self._placed("", found, sizes)

    def _marked(self, given: list[int], own: Sequence[list[int]]) -> list[int] | None:
        """The ids with markers for vectors; None if the images' own tokens are not all there."""
        found: list[int] = []
        at = 0
        for marked in own:
            ids = [self._vector if token < 0 else token for token in marked]
            # Only where a run of the first id begins: anything else would be a search of quadratic length.
            starts = (
                k
                for k in range(at, len(given) - len(ids) + 1)
                if given[k] == ids[0] and (k == at or given[k - 1] != ids[0])
            )
            start = next((k for k in starts if given[k : k + len(ids)] == ids), None)
            if start is None:
                return None
            found += [*given[at:start], *marked]
            at = start + len(ids)
        rest = given[at:]
        return None if own and self._vector in rest else found + rest

    def _check_number(self, name: str, slots: int, images: int) -> None:
        if slots != images:
            raise InvalidRequestError(
                f"{name} has {slots} places for {images} images; allowed: {self._slot!r} once for each image"
            )

    def _expanded(
        self, text: str, pieces: Sequence[str], sizes: Sequence[Size], add_special_tokens: bool
    ) -> ImagePrompt:
        named = [pieces[0]]
        for piece, size in zip(pieces[1:], sizes, strict=True):
            named += [self._written(size.layout), piece]
        ids = self._tokens.encode("".join(named), add_special_tokens=add_special_tokens)
        return self._placed(text, self._filled(ids, sizes), sizes)

    def _written(self, layout: Layout) -> str:
        """A marker for each run of vectors."""
        return "".join(self._tokens.named(part) if isinstance(part, str) else self._tokens.marker for part in layout)

    def _ids_of(self, size: Size) -> list[int]:
        """Of an image alone, markers for its vectors."""
        return self._filled(self._tokens.encode(self._written(size.layout), add_special_tokens=False), [size])

    def _filled(self, ids: Sequence[int], sizes: Sequence[Size]) -> list[int]:
        """As many markers as vectors in the place of each marker."""
        runs = iter([part for size in sizes for part in size.layout if isinstance(part, int)])
        found: list[int] = []
        for token in ids:
            if token < 0:
                found += [token] * next(runs)
            else:
                found.append(token)
        return found

    def _placed(self, text: str, marked: Sequence[int], sizes: Sequence[Size]) -> ImagePrompt:
        ids = np.asarray(marked, dtype=np.int32)
        places = np.flatnonzero(ids < 0)
        expected = sum(size.num_vectors for size in sizes)
        if len(places) != expected:
            raise InvalidRequestError(f"the prompt has {len(places)} places for {expected} vectors of its images")
        spans, first = [], 0
        for size in sizes:
            own = places[first : first + size.num_vectors]
            first += size.num_vectors
            spans.append(_span(own))
        ids[places] = self._vector
        return ImagePrompt(text, ids, tuple(spans))


def _span(places: Any) -> Span:
    """Of ascending positions [vectors]."""
    start, length = int(places[0]), int(places[-1]) - int(places[0]) + 1
    if length == len(places):
        return Span(start, length, ())
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    runs: list[int] = []
    for run in np.split(places - start, breaks):
        runs += [int(run[0]), len(run)]
    return Span(start, length, tuple(runs))


def images_behind_tools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with images of tools' results in the user's message behind them, first; None if tools have none."""
    found: list[dict[str, Any]] = []
    waiting: list[Any] = []
    any_moved = False
    for message in [*messages, {}]:
        content = message.get("content")
        if message.get("role") == "tool":
            if isinstance(content, list):
                images = [part for part in content if part == IMAGE]
                waiting += images
                message = {**message, "content": [part for part in content if part != IMAGE]}
        elif waiting:
            any_moved = True
            if message.get("role") == "user":
                text = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message = {**message, "content": [*waiting, *(text or ())]}
            else:
                found.append({"role": "user", "content": waiting})
            waiting = []
        found.append(dict(message))
    return found[:-1] if any_moved else None
