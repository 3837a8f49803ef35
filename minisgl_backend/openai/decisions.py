"""/v1/decisions: each question is one prompt after the shared input; its options are lettered, and the answer is the
probability of each letter as the next token.

The prefix cache holds the input from the first question on; no token is generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import given
from minisgl_backend.openai.requests.decisions import (
    ChoiceQuestion,
    DecisionRequest,
    Predicate,
    Question,
    shown,
)
from minisgl_backend.openai.vectors import Vectors, numbers

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_TEXT = 32_000_000  # of the input, which every prompt repeats on its way to the tokenizer
_SYSTEM = "You judge an input. Answer each question with one of its options alone."


class LetteredQuestion:
    """The prompts of one question: the whole question; if it has more options than there are letters, also one prompt
    for each first letter, followed by the choice of the second one."""

    def __init__(self, question: Question) -> None:
        self.question = question
        count = len(question.options)
        self._num_groups = -(-count // len(_LETTERS)) if count > len(_LETTERS) else 0
        if isinstance(question, Predicate):
            self.labels = ["yes", "no"]
        elif self._num_groups:
            self.labels = [_LETTERS[index // len(_LETTERS)] + _LETTERS[index % len(_LETTERS)] for index in range(count)]
        else:
            self.labels = list(_LETTERS[:count])

    @property
    def suffixes(self) -> Sequence[str]:
        """The text after the prompt, for each prompt."""
        return ["", *_LETTERS[: self._num_groups]]

    @property
    def words(self) -> Sequence[Sequence[str]]:
        """The words whose probabilities are requested, for each prompt."""
        if not self._num_groups:
            return [self.labels]
        groups = [_LETTERS[: len(_group(self.labels, letter))] for letter in _LETTERS[: self._num_groups]]
        return [list(_LETTERS[: self._num_groups]), *map(list, groups)]

    def messages(self, text: str) -> list[dict[str, str]]:
        lines = [shown(self.question.instructions)]
        if isinstance(self.question, Predicate):
            lines.append("Answer yes or no.")
        else:
            described = zip(self.labels, self.question.options, strict=True)
            lines += [f"{label}) {name}{f': {more}' if more else ''}" for label, (name, more) in described]
            lines.append("Answer with the letters of one option alone.")
        question = "\n".join(lines)
        # The input comes first, so that all questions share it as a prefix.
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"{text}\n\n{question}"}]

    def probabilities(self, rows: Sequence[bytes]) -> list[float]:
        """The options' probabilities, which add up to 1. `rows`: log-probabilities of the words, for each prompt."""
        found = [_softmax(numbers(row)[: len(words)]) for row, words in zip(rows, self.words, strict=True)]
        if not self._num_groups:
            return found[0]
        return [first * one for first, group in zip(found[0], found[1:], strict=True) for one in group]

    def answer(self, rows: Sequence[bytes]) -> dict[str, Any]:
        question, shares = self.question, self.probabilities(rows)
        head = {"type": question.type, "name": question.name}
        if isinstance(question, Predicate):
            return {**head, "probability": shares[0]}
        confidence = max(shares)
        if isinstance(question, ChoiceQuestion):
            values = [choice.value for choice in question.choices]
            listed = [{"value": value, "probability": share} for value, share in zip(values, shares, strict=True)]
            best = values[shares.index(confidence)]
            return {**head, "choice": best, "probabilities": listed, "confidence": confidence}
        levels = [
            {"value": index, "label": level.label, "probability": share}
            for index, (level, share) in enumerate(zip(question.levels, shares, strict=True))
        ]
        score = sum(index * share for index, share in enumerate(shares))
        return {**head, "score": score, "probabilities": levels, "confidence": confidence}


def to_fields(body: DecisionRequest, questions: Sequence[LetteredQuestion]) -> dict[str, Any]:
    """The request to the model `embedding`. Raises ApiError if it would be too large."""
    text, count = body.text, sum(len(one.suffixes) for one in questions)
    if len(text) * count > MAX_TEXT:
        allowed = f"{MAX_TEXT:,} characters in all prompts together"
        raise invalid("input", f"input has {len(text):,} characters, in {count} prompts; allowed: {allowed}")
    prompts = [
        (one.messages(text), suffix, words)
        for one in questions
        for suffix, words in zip(one.suffixes, one.words, strict=True)
    ]
    return {
        "messages": [messages for messages, _, _ in prompts],
        "suffixes": [suffix for _, suffix, _ in prompts],
        "choices": [words for _, _, words in prompts],
        "template": {"enable_thinking": False, **(body.chat_template_kwargs or {})},
        **given(priority=body.priority, cache_salt=body.cache_salt),
    }


def answers_of(questions: Sequence[LetteredQuestion], rows: Sequence[bytes]) -> list[dict[str, Any]]:
    answers, first = [], 0
    for question in questions:
        count = len(question.suffixes)
        answers.append(question.answer(rows[first : first + count]))
        first += count
    return answers


def _group(labels: Sequence[str], letter: str) -> list[str]:
    return [label for label in labels if label[0] == letter]


def _softmax(logprobs: Sequence[float]) -> list[float]:
    """The options' shares, which add up to 1."""
    highest = max(logprobs)
    weights = [math.exp(one - highest) for one in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def usage_of(found: Vectors) -> dict[str, Any]:
    tokens = sum(found.prompt_lengths)
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": found.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
