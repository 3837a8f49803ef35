"""The answers of `LLM`: how they grow, and how they are returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from minisgl_backend.arrays import Float32Array
from minisgl_backend.request import NO_SAMPLING, Content, FinishReason, PoolingParams, Request, SamplingParams
from minisgl_backend.step import Logprobs, SequenceDetail
from minisgl_backend.text.output_processor import OutputProcessor
from minisgl_backend.text.prompt_borders import NO_PARTS, PromptParts
from minisgl_backend.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt."""

    text: str  # without a stop string or the text of a stop token, unless include_stop_str_in_output
    token_ids: list[int]  # end-of-sequence and stop tokens included
    finish_reason: str  # "stop", "length", "cancelled" or "error"
    logprobs: list[Logprobs] | None  # one entry per token; None: not requested
    error: str  # with finish_reason "error"


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt; the properties are those of the first one."""

    prompt_token_ids: list[int]
    completions: list[Completion]  # SamplingParams.n of them
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied
    prompt_logprobs: list[Logprobs] | None  # for every prompt token but the first; None: not requested

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.completions[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class StreamPiece:
    """What one step of the engine added to an answer: often one token, nothing during the prefill of a long prompt."""

    text: str  # whole characters, without text that may yet become a stop string
    token_ids: list[int]
    finish_reason: str | None  # with the last piece, as in Completion
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied; known with the first token
    error: str = ""  # with finish_reason "error"


class AnswerImages(Protocol):
    """The images of one request."""

    def take(self) -> tuple[Content, ...]: ...

    def remove(self) -> None: ...


class Answer:
    """The streams of one request."""

    def __init__(
        self,
        uid: int,
        token_ids: list[int],
        params: SamplingParams,
        vocabulary: Vocabulary,
        pieces: bool,
        images: AnswerImages | None = None,
        parts: PromptParts = NO_PARTS,
    ) -> None:
        self._images = images
        self._num_open = params.n
        ids = np.array(token_ids, dtype="<i4").tobytes()
        stable, borders = parts
        self.request = Request(uid=uid, token_ids=ids, params=params, stable_len=stable, borders=borders)
        self.token_ids = token_ids
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.streams = [AnswerStream(uid + index, self, vocabulary, pieces) for index in range(params.n)]

    def begin(self) -> Request:
        """The request, to be submitted now. Raises InvalidRequestError and CapacityError, of its images."""
        if self._images is not None:
            self.request = msgspec.structs.replace(self.request, contents=self._images.take())
        return self.request

    def end(self) -> None:
        """Frees what belongs to it in shared memory. Safe to call twice."""
        if self._images is not None:
            self._images.remove()

    def note_end(self) -> None:
        """One of its streams has ended."""
        self._num_open -= 1
        if not self._num_open:
            self.end()

    def output(self) -> RequestOutput:
        """All of its answers."""
        return RequestOutput(
            prompt_token_ids=self.token_ids,
            completions=[stream.completion() for stream in self.streams],
            num_cached_tokens=self.cached_tokens,
            prompt_logprobs=None if self.request.params.prompt_logprobs is None else self.prompt_logprobs,
        )


class AnswerStream:
    """One growing answer. Text is made at the end, unless it is streamed or may contain a stop string."""

    def __init__(self, uid: int, answer: Answer, vocabulary: Vocabulary, pieces: bool) -> None:
        params = answer.request.params
        self.uid = uid
        self.answer = answer
        self.token_ids: list[int] = []
        self._output = OutputProcessor.of(params, vocabulary, vocabulary.tail(answer.token_ids))
        self._eager = pieces or self._output.is_eager
        self._pieces: list[str] = []
        self._num_fed = 0  # tokens whose text has been made
        self._taken = (0, 0)  # pieces and tokens that `take_piece` has returned
        self._logprobs: list[Logprobs] = []
        self._reason = FinishReason.RUNNING
        self._error = ""

    def append(self, token: int, reason: int) -> bool:
        """Takes one record of the engine; token -1 means none. True: the answer ends with it."""
        if token >= 0:
            self.token_ids.append(token)
        if not reason and not self._eager:
            return False
        stop_token = token >= 0 and reason == FinishReason.STOP
        new = self.token_ids[self._num_fed :]
        text, _, ended = self._output.feed(new, reason, ends_with_stop_token=stop_token)
        self._num_fed += len(new)
        self._pieces.append(text)
        self._reason = FinishReason(ended)
        return bool(ended)

    def take_detail(self, detail: SequenceDetail) -> None:
        """Takes the detail of a record."""
        if detail.logprobs is not None:
            self._logprobs.append(detail.logprobs)
        if detail.cached_tokens is not None:
            self.answer.cached_tokens = detail.cached_tokens
        if detail.prompt_logprobs:
            self.answer.prompt_logprobs = list(detail.prompt_logprobs)
        self._error = detail.error or self._error

    def take_piece(self) -> StreamPiece:
        """What is new since the last call."""
        num_pieces, num_tokens = self._taken
        self._taken = (len(self._pieces), len(self.token_ids))
        return StreamPiece(
            text="".join(self._pieces[num_pieces:]),
            token_ids=self.token_ids[num_tokens:],
            finish_reason=self._reason.label if self._reason else None,
            num_prompt_tokens=len(self.answer.token_ids),
            num_cached_tokens=self.answer.cached_tokens,
            error=self._error,
        )

    def completion(self) -> Completion:
        """The whole answer."""
        return Completion(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=self._reason.label,
            logprobs=self._logprobs if self.answer.request.params.logprobs is not None else None,
            error=self._error,
        )


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: Float32Array  # [width]
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied


class PooledAnswer:
    """A prompt that becomes a vector: an answer and its only stream in one."""

    def __init__(self, uid: int, token_ids: list[int], pooling: PoolingParams) -> None:
        ids = np.array(token_ids, dtype="<i4").tobytes()
        self.request = Request(uid=uid, token_ids=ids, params=NO_SAMPLING, pooling=pooling)
        self.uid = uid
        self.streams = [self]
        self.token_ids: list[int] = []  # there are no answer tokens
        self.error = ""
        self._prompt_ids = token_ids
        self._vector = b""
        self._cached_tokens = 0

    @property
    def answer(self) -> PooledAnswer:
        return self

    def begin(self) -> Request:
        """The request, to be submitted now."""
        return self.request

    def end(self) -> None:
        """Has nothing to free."""

    def note_end(self) -> None:
        """Its only stream has ended."""

    def append(self, token: int, reason: int) -> bool:
        """Takes one record of the engine; see AnswerStream."""
        return bool(reason)

    def take_detail(self, detail: SequenceDetail) -> None:
        """Takes the detail of a record."""
        self._vector = detail.pooled or self._vector
        self._cached_tokens = detail.cached_tokens or self._cached_tokens
        self.error = detail.error or self.error

    def output(self) -> EmbeddingOutput:
        """The whole result."""
        return EmbeddingOutput(np.frombuffer(self._vector, dtype="<f4"), self._prompt_ids, self._cached_tokens)
