"""Chunks of the engine -> the output tensors that the client asked for, and no others.

Knows nothing of Triton: it returns arrays by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_backend.engine.messages import TokenLogprobs
from minisgl_backend.errors import MinisglError
from minisgl_backend.request import FinishReason
from minisgl_backend.serving.wire import Chunk, OutputOptions, Part, PerfMetrics
from minisgl_backend.text.detokenizer import Detokenizer, new_detokenizer
from minisgl_backend.text.vocabulary import Vocabulary

Arrays = dict[str, "npt.NDArray[Any]"]


class StreamError(MinisglError):
    """The stream ends with this error. `status` is the name of a Triton error code."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _StreamText:
    options: OutputOptions
    detokenizer: Detokenizer
    last_number: int = 0
    log_probs: list[float] = field(default_factory=list)


class AnswerEncoder:
    """The text of every stream so far, by uid. Used by one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._streams: dict[int, _StreamText] = {}

    def __len__(self) -> int:
        """Streams with state."""
        return len(self._streams)

    def encode(self, chunk: Chunk) -> Arrays:
        """Arrays with a leading batch dimension of 1, by output name. Raises StreamError where there are none."""
        for uid in chunk.forget:
            self._streams.pop(uid, None)
        if chunk.failure is not None:
            raise StreamError(*chunk.failure)
        if not chunk.parts:  # a probe: nobody reads the answer
            return {"text_output": _texts([""])}
        if chunk.options is not None and len(chunk.parts) == 1:
            self._streams[chunk.uid] = self._new(chunk.options)
        if len(chunk.parts) > 1:
            assert chunk.options is not None, "an answer of several sequences comes in one chunk"
            streams = [self._new(chunk.options) for _ in chunk.parts]
        else:
            streams = [self._known(chunk)]
        texts = [self._text(stream, part) for stream, part in zip(streams, chunk.parts, strict=True)]
        options = streams[0].options
        if options.prompt is not None:
            texts = [options.prompt + text for text in texts]
        arrays: Arrays = {"text_output": _texts(texts)}
        if options != _PLAIN_STREAM and options != _PLAIN_WHOLE:
            self._add_what_was_asked(arrays, chunk, options, streams)
        if chunk.num_sequences > 1 and len(chunk.parts) == 1:
            arrays["sequence_index"] = _ints([chunk.parts[0].index])
        if chunk.parts[0].reason and len(chunk.parts) == 1:
            del self._streams[chunk.uid]
        return arrays

    def _new(self, options: OutputOptions) -> _StreamText:
        return _StreamText(options, new_detokenizer(self._vocabulary, options.skip_special_tokens))

    def _known(self, chunk: Chunk) -> _StreamText:
        stream = self._streams.get(chunk.uid)
        if stream is None or chunk.number != stream.last_number + 1:
            expected = 1 if stream is None else stream.last_number + 1
            self._streams.pop(chunk.uid, None)
            message = f"chunk {chunk.number} came where chunk {expected} was due (stream {chunk.uid}): the detokenizer"
            raise StreamError("INTERNAL", f"{message} was restarted, or runs in more than one instance")
        stream.last_number = chunk.number
        return stream

    def _text(self, stream: _StreamText, part: Part) -> str:
        if part.text is not None:
            return part.text
        ids = np.frombuffer(part.token_ids, dtype="<i4").tolist()
        if part.ends_with_stop_token:
            ids.pop()
        text = stream.detokenizer.feed(ids)
        return text + stream.detokenizer.finish() if part.reason else text

    def _add_what_was_asked(
        self, arrays: Arrays, chunk: Chunk, options: OutputOptions, streams: Sequence[_StreamText]
    ) -> None:
        parts = chunk.parts
        if options.finish_reason:
            # vllm_backend's spelling: "None" while the sequence goes on.
            labels = [FinishReason(part.reason).label if part.reason else "None" for part in parts]
            arrays["finish_reason"] = _texts(labels)
        if options.num_input_tokens:
            arrays["num_input_tokens"] = _ints([chunk.num_input_tokens])
        if options.num_output_tokens:
            arrays["num_output_tokens"] = _ints([len(part.token_ids) // 4 for part in parts])
        if options.cumulative_logprob:
            arrays["cumulative_logprob"] = _floats([part.cumulative_logprob for part in parts])
        if options.logprobs:
            arrays["logprobs"] = _texts([self._logprobs_json(part.logprobs) for part in parts])
        if options.prompt_logprobs and chunk.options is not None:
            arrays["prompt_logprobs"] = _texts([self._logprobs_json(chunk.prompt_logprobs)])
        if options.log_probs:
            self._add_log_probs(arrays, parts, streams)
        if chunk.metrics is not None:
            _add_metrics(arrays, chunk.metrics)

    def _add_log_probs(self, arrays: Arrays, parts: Sequence[Part], streams: Sequence[_StreamText]) -> None:
        """tensorrtllm_backend's form: all log-probabilities so far, sequences padded to one length."""
        for stream, part in zip(streams, parts, strict=True):
            stream.log_probs += [entry.logprob for entry in part.logprobs]
        longest = max(len(stream.log_probs) for stream in streams)
        rows = [stream.log_probs + [0.0] * (longest - len(stream.log_probs)) for stream in streams]
        arrays["cum_log_probs"] = _floats([part.cumulative_logprob for part in parts])
        arrays["output_log_probs"] = np.asarray([rows], dtype=np.float32).reshape(1, len(rows), longest)

    def _logprobs_json(self, entries: Sequence[TokenLogprobs]) -> str:
        """vllm_backend's form: for each position {token id: {logprob, rank, decoded_token}}; "null" for none."""
        if not entries:
            return "null"
        return json.dumps([self._position(entry) for entry in entries], ensure_ascii=False)

    def _position(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        position = {
            str(token_id): self._logprob(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top, strict=True), start=1)
        }
        position.setdefault(str(entry.token_id), self._logprob(entry.token_id, entry.logprob, entry.rank))
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        # JSON has no infinities; a token that cannot be sampled has the logarithm of the smallest float instead.
        logprob = max(logprob, -1e4)
        return {"logprob": logprob, "rank": rank, "decoded_token": self._vocabulary.token_text(token_id)}


_PLAIN_STREAM = OutputOptions(stream=True)
_PLAIN_WHOLE = OutputOptions()


def _add_metrics(arrays: Arrays, metrics: PerfMetrics) -> None:
    reused = min(metrics.reused_pages, metrics.total_pages)
    arrays["kv_cache_reused_blocks"] = _ints([reused])
    arrays["kv_cache_alloc_new_blocks"] = _ints([metrics.total_pages - reused])
    arrays["kv_cache_alloc_total_blocks"] = _ints([metrics.total_pages])
    for name, value in (
        ("arrival_time_ns", metrics.arrival_ns),
        ("first_token_time_ns", metrics.first_token_ns),
        ("last_token_time_ns", metrics.last_token_ns),
    ):
        arrays[name] = np.asarray([[value]], dtype=np.int64)
    # Fields of speculative decoding, which this server has not: nothing was drafted.
    arrays["total_draft_tokens"] = arrays["total_accepted_draft_tokens"] = _ints([0])
    arrays["acceptance_rate"] = _floats([0.0])


def _texts(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    array = np.empty((1, len(texts)), dtype=np.object_)
    for index, text in enumerate(texts):
        array[0, index] = text.encode("utf-8")
    return array


def _ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray([values], dtype=np.int32)


def _floats(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.asarray([values], dtype=np.float32)
