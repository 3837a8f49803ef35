"""POST /v1/decisions: typed questions about an input, answered by probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Model, Named, check_unicode
from minisgl_backend.openai.requests.pooling import Priority

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10
Text = Annotated[str, Field(min_length=1)]


class Part(Model):
    """A piece of an input or of a question: text or JSON; images are not served."""

    type: Literal["input_text", "output_text", "refusal", "input_json"]
    text: str | None = None
    refusal: str | None = None
    data: dict[str, Any] | list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None  # has no effect: prefixes are cached automatically

    @property
    def shown(self) -> str:
        if self.type == "input_json":
            return json.dumps(self.data, ensure_ascii=False)
        return self.text or self.refusal or ""


Parts = Annotated[list[Part], Field(fail_fast=True)]


class Item(Model):
    """A message, a call, or the output of a call."""

    type: Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"] = (
        "message"
    )
    role: Literal["user", "developer", "system", "assistant"] = "user"
    content: str | Parts | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    # Accepted without effect.
    id: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    phase: str | None = None
    status: str | None = None

    @property
    def shown(self) -> str:
        if self.type == "message":
            return shown(self.content)
        if self.output is not None:
            return f"[output] {shown(self.output)}"
        return f"[call] {self.name or ''} {self.arguments or self.input or ''}"


def shown(content: str | Sequence[Part] | None) -> str:
    """A text, or the concatenated parts, one per line."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.shown for part in content)


class Asked(Model):
    """What all kinds of questions have."""

    name: str | None = None
    instructions: Text | Parts


class Predicate(Asked):
    """Is it true?"""

    type: Literal["predicate"]

    @property
    def options(self) -> Sequence[tuple[str, str | None]]:
        return [("yes", None), ("no", None)]


class Choice(Model):
    value: str | bool
    description: str | None = None

    @property
    def label(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class ChoiceQuestion(Asked):
    """Which of these?"""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES, fail_fast=True)]

    @property
    def options(self) -> Sequence[tuple[str, str | None]]:
        return [(choice.label, choice.description) for choice in self.choices]


class Level(Model):
    label: str
    description: str | None = None


class ScoreQuestion(Asked):
    """How far up a scale, from the lowest level?"""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_LEVELS, fail_fast=True)]

    @property
    def options(self) -> Sequence[tuple[str, str | None]]:
        return [(level.label, level.description) for level in self.levels]


Question = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionRequest(Named):
    """POST /v1/decisions."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=1024, fail_fast=True)]
    questions: Annotated[list[Question], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
    # Beyond OpenAI.
    priority: Priority | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text to judge; a transcript if there are several speakers."""
        if isinstance(self.input, str):
            return self.input
        roles = {item.role for item in self.input if item.type == "message"}
        named = len(roles) > 1 or any(item.type != "message" for item in self.input)
        lines = [
            f"{item.role}: {item.shown}" if named and item.type == "message" else item.shown for item in self.input
        ]
        return "\n\n".join(lines)

    def check(self) -> None:
        """Raises ApiError for errors other than types."""
        if not self.text.strip():
            raise invalid("input", "input is empty; allowed: a text, or messages with one")
        for name, value in (
            ("input", self.text),
            ("questions", [(shown(one.instructions), *one.options) for one in self.questions]),
            ("cache_salt", self.cache_salt),
            ("chat_template_kwargs", self.chat_template_kwargs),
        ):
            check_unicode(name, value)
        for number, question in enumerate(self.questions):
            # A text and a boolean are different choices, even if they look the same.
            labels = [repr(one.value) for one in question.choices] if isinstance(question, ChoiceQuestion) else []
            if len(set(labels)) != len(labels):
                raise invalid("questions", f"questions[{number}] has a choice twice; allowed: each once")
            if not shown(question.instructions).strip():
                raise invalid("questions", f"questions[{number}] has no instructions; allowed: a text")
