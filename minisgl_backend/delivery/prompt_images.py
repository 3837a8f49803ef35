"""The images of prompts that a caller gives to `LLM`, in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.taken_images import TakenImages
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.families import why_blind
from minisgl_backend.images.front import ImageFront, SeenPrompt, open_front
from minisgl_backend.images.local import local_sources, take_local_images
from minisgl_backend.images.parts import asked_of_all, has_images, without_eyes
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import Content, SamplingParams

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SeenIds:
    """A prompt with images, measured and not decoded."""

    token_ids: list[int]
    seen: SeenPrompt


class PromptImages:
    """Of one model. Processes and shared memory begin with the first image."""

    def __init__(
        self, model_dir: Path, model: ModelConfig, config: EngineConfig, tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self._model_dir, self._tokenizer, self._config = model_dir, tokenizer, config
        self._sees = config.encoder_cache_bytes > 0 and model.encoder is not None
        self._why_not = why_blind(model_dir, model.why_no_images)
        self._taken = TakenImages()

    def close(self) -> None:
        """Safe to call twice."""
        if "_front" in self.__dict__ and self._front is not None:
            self._front.close()
        self._taken.close()

    @cached_property
    def _front(self) -> ImageFront | None:
        """None: the model has no eyes."""
        if not self._sees:  # without a tokenizer
            return None
        front, self._why_not = open_front(self._model_dir, self._tokenizer(), self._config, sees=True, why_not="")
        return front

    def _seeing(self, messages: Sequence[Any] = ()) -> ImageFront:
        if self._front is None:
            raise without_eyes(messages, self._why_not)
        return self._front

    def of_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], options: Any
    ) -> SeenIds | None:
        """None if there are no images, and no text that spells one. Raises InvalidRequestError, CapacityError."""
        if not has_images(messages) and (self._front is None or not self._front.are_written_in(list(messages))):
            return None
        front = self._seeing(messages)
        taken, sources = take_local_images(messages, asked_of_all(options, None))
        return _seen(front.of_chat(taken, front.load(sources), arguments))

    def of_prompt(self, prompt: str | list[int], images: Any, options: Any, uuids: Any) -> SeenIds:
        """vLLM's `multi_modal_data`. Raises InvalidRequestError, CapacityError."""
        front = self._seeing()
        sources = local_sources(images, "multi_modal_data.image", asked_of_all(options, None), uuids)
        if isinstance(prompt, str):
            return _seen(front.of_text("prompt", prompt, sources, add_special_tokens=True))
        return _seen(front.of_ids("prompt_token_ids", prompt, sources))

    def of_answer(self, prompt: SeenIds, params: SamplingParams) -> tuple[SamplingParams, ImagesOfAnswer]:
        """For one answer to the prompt; the parameters with the family's own tokens masked. Raises
        InvalidRequestError."""
        if not prompt.seen.images:
            return params, ImagesOfAnswer(prompt.seen, self._seeing(), self._taken)
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs is given with images; allowed: without images")
        return self._seeing().masking(params), ImagesOfAnswer(prompt.seen, self._seeing(), self._taken)


class ImagesOfAnswer:
    """The images of one answer: decoded when it begins, removed when it ends."""

    def __init__(self, seen: SeenPrompt, front: ImageFront, taken: TakenImages) -> None:
        self._seen, self._front, self._taken = seen, front, taken

    def take(self) -> tuple[Content, ...]:
        """Raises InvalidRequestError, CapacityError."""
        return self._taken.take(self, self._front.contents(self._seen)) if self._seen.images else ()

    def remove(self) -> None:
        """Safe to call twice."""
        self._taken.remove(self)


def _seen(seen: SeenPrompt) -> SeenIds:
    return SeenIds([int(token) for token in seen.prompt.token_ids], seen)
