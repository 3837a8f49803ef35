"""Chunks of the engine -> text, or the token ids themselves.

All outputs other than text are made in `delivery.output_fields`; the engine's front sends them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.delivery.arrays import Arrays, texts
from minisgl_backend.errors import MinisglError
from minisgl_backend.ipc.wire import Chunk, Part, TextOptions
from minisgl_backend.request import FinishReason
from minisgl_backend.text.output_processor import OutputProcessor
from minisgl_backend.text.vocabulary import Vocabulary

MOST_STREAMS = 1 << 16  # with state; far more than any front has, but direct clients of the detokenizer may start more


class StreamError(MinisglError):
    """The stream ends with this error. `status` is the name of a Triton error code."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _StreamText:
    before: str  # earlier text: the prompt, or with `keeps` all that was sent
    output: OutputProcessor
    keeps: bool = False
    last_number: int = 0


class TextOutputEncoder:
    """The text of every stream so far, by uid. Used by one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._streams: dict[int, _StreamText] = {}

    def __len__(self) -> int:
        """Number of streams with state."""
        return len(self._streams)

    def encode(self, chunk: Chunk) -> Arrays:
        """The text of each part, `text_output` [n]; or `output_ids` [1, 1, tokens] of the only part.

        The text is one-dimensional even with a batch dimension, as TensorRT-LLM's postprocessing sends it: its clients
        read `text_output[0]` and fail on a row. Raises StreamError if there is nothing to send.
        """
        for uid in chunk.forget:
            self._streams.pop(uid, None)
        if chunk.failure is not None:
            raise StreamError(*chunk.failure)
        if chunk.token_ids:
            return {"output_ids": _output_ids(chunk)}
        return {"text_output": texts(self._texts(chunk))[0]}

    def _texts(self, chunk: Chunk) -> list[str]:
        if not chunk.parts:  # a probe, whose answer is not read
            return [""]
        if len(chunk.parts) > 1:
            assert chunk.options is not None, "an answer of several sequences comes in one chunk"
            return [self._text(self._new(chunk.options), part) for part in chunk.parts]
        if chunk.options is not None:
            if len(self._streams) >= MOST_STREAMS:
                del self._streams[next(iter(self._streams))]  # the oldest
            self._streams[chunk.uid] = self._new(chunk.options)
        text = self._text(self._known(chunk), chunk.parts[0])
        if chunk.parts[0].is_last:
            del self._streams[chunk.uid]
        return [text]

    def _new(self, options: TextOptions) -> _StreamText:
        output = OutputProcessor(
            self._vocabulary,
            skip_special_tokens=options.skip_special_tokens,
            prompt_tail=options.prompt_tail,
        )
        return _StreamText(options.prompt or "", output, options.all_so_far)

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
            text = part.text
        else:
            ids = np.frombuffer(part.token_ids, dtype="<i4").tolist()
            reason = FinishReason.STOP if part.is_last else FinishReason.RUNNING
            text = stream.output.feed(ids, reason, ends_with_stop_token=part.ends_with_stop_token).text
        if stream.before:
            text, stream.before = stream.before + text, ""
        if stream.keeps:
            stream.before = text
        return text


def _output_ids(chunk: Chunk) -> Int32Array:
    """int32 [1, 1, tokens], as TensorRT-LLM sends them: batch, beam, tokens. Needs no state."""
    prompt = chunk.options.prompt_ids if chunk.options is not None else b""
    ids = np.frombuffer(prompt + b"".join(part.token_ids for part in chunk.parts), dtype="<i4")
    return ids.astype(np.int32, copy=False).reshape(1, 1, -1)
