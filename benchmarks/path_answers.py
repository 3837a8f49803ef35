"""What the null runner must answer, and whether it did: order, completeness, counts, and how late each token was."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from benchmarks.path_client import Exchange
from benchmarks.path_http_client import HttpExchange
from minisgl_backend.engine.null_start import NULL_ANSWER
from minisgl_backend.text.tokenizer import Tokenizer
from minisgl_backend.text.vocabulary import load_vocabulary


@dataclass
class Answer:
    """What one exchange brought, compared with what it had to be."""

    faults: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_responses: int = 0
    first_token_s: float = 0.0  # from the sending of the request
    delays: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [num_tokens] seconds
    emitted: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [num_tokens] time.monotonic()


class NullAnswers:
    """The null runner's text goes round for ever; a prompt of n tokens enters it at place n."""

    def __init__(self, model_dir: str) -> None:
        self._tokenizer = Tokenizer(model_dir)
        vocabulary = load_vocabulary(model_dir)
        ids = self._tokenizer.encode(NULL_ANSWER, add_special_tokens=False)
        self._pieces = [vocabulary.token_text(token).encode() for token in ids]
        if b"".join(self._pieces) != NULL_ANSWER.encode():
            raise ValueError(f"the tokenizer of {model_dir} does not split the null runner's text into plain pieces")

    def num_prompt_tokens(self, prompt: str) -> int:
        return len(self._tokenizer.encode(prompt))

    @cache  # noqa: B019  one object for the whole run
    def expected(self, place: int, num_tokens: int) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The text of `num_tokens` tokens from `place` on, and where each of them ends; int64 [num_tokens]."""
        rounds = self._pieces * (2 + num_tokens // len(self._pieces))
        pieces = rounds[place : place + num_tokens]
        return b"".join(pieces), np.cumsum([len(piece) for piece in pieces])

    def answer(self, num_prompt_tokens: int, num_tokens: int) -> tuple[bytes, npt.NDArray[np.int64]]:
        return self.expected(num_prompt_tokens % len(self._pieces), num_tokens)


class Question:
    """One request, and what must come back."""

    def __init__(self, answers: NullAnswers, prompt: str, max_tokens: int, *, usage: bool) -> None:
        """`usage`: it asks for usage counts and a finish reason with each response."""
        self.prompt = prompt
        self.name = prompt.lower().replace(" ", "-")
        self.max_tokens = max_tokens
        self.usage = usage
        self._answers = answers

    def check(self, exchange: Exchange, emissions: npt.NDArray[np.float64]) -> Answer:
        """Compares; `emissions` are the times of the core's steps, time.monotonic() seconds; float64 [num_steps]."""
        responses = [
            (moment, service_pb2.ModelStreamInferResponse.FromString(raw)) for moment, raw in exchange.messages()
        ]
        answer = Answer()
        errors = [response.error_message for _, response in responses if response.error_message]
        answer.faults += [f"{self.name}: error {message!r}" for message in errors]
        if not exchange.done:
            answer.faults.append(f"{self.name}: never ended")
        data = [(moment, response.infer_response) for moment, response in responses if not response.error_message]
        outputs = [_outputs(response) for _, response in data]
        if not data:
            answer.faults.append(f"{self.name}: no response")
            return answer
        self._check_ids(data, answer)
        ends = self._check_text([bytes(found["text_output"]) for found in outputs], answer)
        if self.usage:
            self._check_usage(outputs, ends, answer)
        moments = [moment for moment, _ in data]
        self._measure(moments, ends, exchange.sent, outputs[-1].get("first_token_time_ns"), emissions, answer)
        return answer

    def check_events(self, exchange: HttpExchange, emissions: npt.NDArray[np.float64]) -> Answer:
        """The same for a stream of the OpenAI-compatible endpoint, whose usage comes once, at its end."""
        answer = Answer()
        if exchange.status != 200 or not exchange.done:
            answer.faults.append(f"{self.name}: status {exchange.status}, ended at {exchange.done}")
            return answer
        events = exchange.events()
        last, done = (event for _, event in events[-2:])
        chunks = events[:-2]
        if done != "[DONE]" or not chunks or any(event["id"] != f"cmpl-{self.name}" for _, event in events[:-1]):
            answer.faults.append(f"{self.name}: it does not end with [DONE], or a chunk has another request's id")
            return answer
        choices = [event["choices"][0] for _, event in chunks]
        reasons = [choice["finish_reason"] for choice in choices]
        if reasons != [None] * (len(choices) - 1) + ["length"]:
            answer.faults.append(f"{self.name}: finish_reason is not length with the last chunk alone")
        prompt = self._answers.num_prompt_tokens(self.prompt)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": self.max_tokens,
            "total_tokens": prompt + self.max_tokens,
        }
        if {name: last["usage"].get(name) for name in counts} != counts:
            answer.faults.append(f"{self.name}: usage is {last['usage']}, expected {counts}")
        ends = self._check_text([choice["text"].encode() for choice in choices], answer)
        moments = [moment for moment, _ in chunks]
        first_token_ns = last["perf_metrics"].get("first_token_time_ns")
        self._measure(moments, ends, exchange.sent, first_token_ns, emissions, answer)
        return answer

    def _measure(
        self,
        moments: Sequence[float],
        ends: npt.NDArray[np.int64],
        sent: float,
        first_token_ns: int | None,
        emissions: npt.NDArray[np.float64],
        answer: Answer,
    ) -> None:
        answer.num_responses = len(moments)
        answer.first_token_s = moments[0] - sent
        if first_token_ns is None:
            answer.faults.append(f"{self.name}: the last response has no perf metrics")
            return
        arrivals = np.repeat(moments, np.diff(ends, prepend=0))
        answer.emitted = _emitted(len(arrivals), first_token_ns, emissions)
        answer.delays = arrivals[: len(answer.emitted)] - answer.emitted

    def _check_ids(self, data: Sequence[tuple[float, Any]], answer: Answer) -> None:
        if any(response.id != self.name for _, response in data):
            answer.faults.append(f"{self.name}: a response has another request's id")
        finals = [response.parameters["triton_final_response"].bool_param for _, response in data]
        if finals != [False] * (len(data) - 1) + [True]:
            answer.faults.append(f"{self.name}: not the last data response alone is final")

    def _check_text(self, pieces: Sequence[bytes], answer: Answer) -> npt.NDArray[np.int64]:
        """The number of tokens that had come with each response; int64 [num_responses]."""
        text, ends = self._answers.answer(self._answers.num_prompt_tokens(self.prompt), self.max_tokens)
        found = b"".join(pieces)
        if found != text:
            place = next(
                (i for i, (a, b) in enumerate(zip(found, text, strict=False)) if a != b), min(len(found), len(text))
            )
            answer.faults.append(
                f"{self.name}: text of {len(found)} bytes, expected {len(text)}; from {place} on "
                f"{found[place : place + 20]!r}, expected {text[place : place + 20]!r}"
            )
        if any(not piece for piece in pieces):
            answer.faults.append(f"{self.name}: a response without text")
        counts = np.searchsorted(ends, np.cumsum([len(piece) for piece in pieces]), side="right")
        answer.num_tokens = int(counts[-1])
        return counts

    def _check_usage(self, outputs: Sequence[dict[str, Any]], ends: npt.NDArray[np.int64], answer: Answer) -> None:
        counts = [found.get("num_output_tokens") for found in outputs]
        if counts != np.diff(ends, prepend=0).tolist():
            answer.faults.append(f"{self.name}: num_output_tokens does not fit the texts")
        prompt = self._answers.num_prompt_tokens(self.prompt)
        if any(found.get("num_input_tokens") != prompt for found in outputs):
            answer.faults.append(f"{self.name}: num_input_tokens is not {prompt}")
        reasons = [found.get("finish_reason") for found in outputs]
        if reasons != [b"None"] * (len(outputs) - 1) + [b"length"]:
            answer.faults.append(f"{self.name}: finish_reason is not length with the last response alone")


def _emitted(num_tokens: int, first_token_ns: int, emissions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """When the core had each token, time.monotonic() seconds; float64 [num_tokens], fewer where emissions lack.

    The core says when it had the first token, which is after the step that made it and before the next one. From there
    on every step makes one.
    """
    first = first_token_ns / 1e9 - (time.time() - time.monotonic())
    step = int(np.searchsorted(emissions, first, side="right")) - 1
    return emissions[step : step + num_tokens]


_FORMATS = {"INT32": "<i", "INT64": "<q", "FP32": "<f"}


def _outputs(response: Any) -> dict[str, Any]:
    """The first value of each output: bytes or a number."""
    values: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values[output.name] = (
            raw[4:] if output.datatype == "BYTES" else struct.unpack(_FORMATS[output.datatype], raw)[0]
        )
    return values
