"""Requests with images -> prompts with the tokens of their images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import asked_of_all, has_images, take_images, take_indexed, without_eyes
from minisgl_backend.request import Content, SamplingParams
from minisgl_backend.serving.fields import json_object
from minisgl_backend.serving.image_tensors import GivenImages, given_images
from minisgl_backend.serving.prompt_settings import CodecSettings, listed_messages
from minisgl_backend.serving.tensors import IMAGES

if TYPE_CHECKING:  # the engine front imports this module, but not the workers'
    from minisgl_backend.images.front import ImageFront, SeenPrompt


_TENSORS = (*IMAGES, "image_sizes_input")
# How types of parts begin that are no text, or an escape that may spell one: writers of JSON escape no letters.
_HINT = re.compile(r'"(?:image|video|audio|input_|file|document)|\\u00[0-7]')


class ImageCodec:
    """Of one model."""

    def __init__(self, images: ImageFront | None, settings: CodecSettings) -> None:
        """`images`: None for a model without eyes, which refuses them."""
        self._images = images
        self._settings = settings

    def seen(self, fields: Mapping[str, Any]) -> SeenPrompt | None:
        """The prompt of a request with images, or of one that spells their tokens; None for all others."""
        given = next((name for name in _TENSORS if len(fields.get(name, ()))), "")
        data = fields.get("image_data", ())
        messages = fields.get("messages")
        listed: list[Any] = []
        if messages and (data or self._may_have_images(messages)):
            listed = listed_messages(messages)
        if given or data or (listed and has_images(listed)):
            if self._images is None:
                raise without_eyes(listed, self._settings.why_no_images, given or "image")
        elif not listed:
            return None
        if self._images is None:  # a text that spells some token is nothing special then
            return None
        asked = asked_of_all(fields.get("mm_processor_kwargs"), fields.get("media_io_kwargs"))
        if given:
            if data or has_images(listed):
                raise InvalidRequestError(f"{given} is given together with images in messages; allowed: one of them")
            tensors = given_images(fields, asked, self._images.load, self._images.max_images)
            seen = self._of_text_or_ids(fields, tensors)
            tensors.check_sizes([image.upright for image in seen.images])
            return self._checked(seen)
        taken, sources = take_indexed(listed, data) if data else take_images(listed, asked)
        sources = self._images.load(sources)
        if not sources and not self._images.are_written_in(listed):
            return None
        self._settings.check_bytes("messages", taken)
        template = json_object("chat_template_kwargs", fields.get("chat_template_kwargs", ""))
        special = fields.get("add_special_tokens", False)
        return self._checked(self._images.of_chat(taken, sources, template, add_special_tokens=special))

    def _may_have_images(self, messages: str | list[Any]) -> bool:
        """Whether it is worth while to parse them: of most requests this is all that images cost."""
        if isinstance(messages, list):
            return has_images(messages) or (self._images is not None and self._images.are_written_in(messages))
        return may_hold_images(messages) or (self._images is not None and self._images.are_written_in(messages))

    def _of_text_or_ids(self, fields: Mapping[str, Any], given: GivenImages) -> SeenPrompt:
        """The prompt has a place for each of the images, or is a user's question behind them."""
        images, sources = self._images, given.sources
        assert images is not None, "checked before"
        if fields.get("prompt_token_ids") is not None:
            return images.of_ids("prompt_token_ids", fields["prompt_token_ids"], sources)
        if fields.get("messages"):
            raise InvalidRequestError(
                f"{given.name} is given together with messages; allowed: images in the messages' content"
            )
        text = fields.get("text_input")
        if text is None:
            raise InvalidRequestError("text_input is missing; allowed with images: a text, or prompt_token_ids")
        self._settings.check_bytes("text_input", text)
        default = given.goes_through_template(images.are_written_in(text), self._settings.apply_chat_template)
        if fields.get("apply_chat_template", default):
            content = [*({"type": "image"} for _ in sources), {"type": "text", "text": text}]
            template = json_object("chat_template_kwargs", fields.get("chat_template_kwargs", ""))
            special = fields.get("add_special_tokens", False)
            return images.of_chat([{"role": "user", "content": content}], sources, template, add_special_tokens=special)
        special = fields.get("add_special_tokens", True)
        return images.of_text("text_input", text, sources, add_special_tokens=special)

    def _checked(self, seen: SeenPrompt) -> SeenPrompt:
        self._settings.check_prompt("the prompt", seen.prompt.token_ids, seen.counted)
        return seen

    def masking(self, seen: SeenPrompt | None, params: SamplingParams) -> SamplingParams:
        """See `ImageFront.masking`."""
        return params if seen is None or self._images is None or not seen.images else self._images.masking(params)

    def contents(self, seen: SeenPrompt | None, params: SamplingParams, *, only_counts: bool) -> tuple[Content, ...]:
        """Decodes the images, the last thing that may fail."""
        if seen is None or self._images is None or not seen.images or only_counts:
            return ()
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is given with images; allowed: without images")
        return self._images.contents(seen)


def may_hold_images(messages: str) -> bool:
    """Whether messages, as JSON text, may have images. Some texts are mistaken for one, no image is missed."""
    return _HINT.search(messages) is not None
