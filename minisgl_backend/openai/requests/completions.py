"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Generating, TokenIds

MAX_PROMPTS = 1024
MAX_CHOICES = 256  # sequences per request: prompts times n
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    prompt_logprobs: int | None = None

    @property
    def prompts(self) -> Sequence[str | TokenIds]:
        """The prompts, at least one, each a text or token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def only_echo(self) -> bool:
        """Nothing is generated: OpenAI's way to get the log-probabilities of a text."""
        return self.max_tokens == 0 and bool(self.echo)

    def check(self) -> None:
        super().check()
        if not self.prompts:
            raise invalid("prompt", "prompt is empty; allowed: at least one prompt")
        if len(self.prompts) > MAX_PROMPTS:
            raise invalid("prompt", f"prompt has {len(self.prompts)} entries; allowed: at most {MAX_PROMPTS}")
        if len(self.prompts) * self.num_choices > MAX_CHOICES and len(self.prompts) > 1:
            choices = f"{len(self.prompts)} prompts times n are more than {MAX_CHOICES} choices"
            raise invalid("prompt", f"prompt: {choices}; allowed: at most {MAX_CHOICES}")
        if self.stream and self.prompt_logprobs:
            reason = "allowed: only with stream=false"
            raise invalid("prompt_logprobs", f"prompt_logprobs is {self.prompt_logprobs}; {reason}")
        if self.suffix:
            raise invalid("suffix", "suffix is given; this server has no models that fill in")

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.only_echo:
            values["max_tokens"] = 1
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.echo and self.logprobs is not None and values.get("prompt_logprobs", 0) >= 0:
            values["prompt_logprobs"] = max(self.logprobs, values.get("prompt_logprobs", 0))
        return values

    def names(self) -> dict[str, str]:
        return {**super().names(), "text_input": "prompt", "prompt_token_ids": "prompt"}
