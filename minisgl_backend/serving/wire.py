"""What travels between our own Triton models: `Spec` from tokenizer to engine, `Chunk` from engine to detokenizer.

Knows nothing of Triton; each is packed with msgspec into one UINT8 tensor.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_backend.engine.messages import TokenLogprobs
from minisgl_backend.request import SamplingParams


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client wants to read of its answer."""

    stream: bool = False
    prompt: str | None = None  # goes before the answer (only with stream=False)
    skip_special_tokens: bool = True
    include_stop_string: bool = False
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    log_probs: bool = False  # tensorrtllm_backend's cum_log_probs and output_log_probs
    perf_metrics: bool = False


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checked request, all but its prompt tokens."""

    params: SamplingParams
    options: OutputOptions
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    request_id: str = ""


class PerfMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times are nanoseconds since the epoch, as clients of tensorrtllm_backend read them; pages are KV pages."""

    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    reused_pages: int
    total_pages: int


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of one sequence."""

    token_ids: bytes = b""  # int32, little-endian
    text: str | None = None  # the text instead of the tokens, where the front had to look for stop strings
    reason: int = 0  # FinishReason; 0: the sequence goes on
    index: int = 0  # of the sequence, with n > 1
    ends_with_stop_token: bool = False  # the last token is no text
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float = 0.0  # of the sequence so far


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response of a stream. Chunks of one uid arrive in order and are numbered from 1."""

    uid: int  # of the sequence (of the first one where an answer holds several)
    number: int
    confirm: bool = True  # False: with a later one, so that few chunks cost a message to the front
    parts: tuple[Part, ...] = ()
    options: OutputOptions | None = None  # with number 1
    num_input_tokens: int = 0
    num_sequences: int = 1
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    metrics: PerfMetrics | None = None
    failure: tuple[str, str] | None = None  # status and message: the request ends with this error
    forget: tuple[int, ...] = ()  # uids that end here without a last part


class Codec:
    """Structs <-> UINT8 tensors. Not thread-safe: one for each thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._spec = msgspec.msgpack.Decoder(Spec)
        self._chunk = msgspec.msgpack.Decoder(Chunk)

    def pack(self, message: Spec | Chunk) -> npt.NDArray[np.uint8]:
        """uint8 [n]."""
        return np.frombuffer(self._encoder.encode(message), dtype=np.uint8)

    def spec(self, tensor: npt.NDArray[np.uint8]) -> Spec:
        """Raises msgspec.MsgspecError where it is none."""
        return self._spec.decode(tensor.tobytes())

    def chunk(self, tensor: npt.NDArray[np.uint8]) -> Chunk:
        """Raises msgspec.MsgspecError where it is none."""
        return self._chunk.decode(tensor.tobytes())
