"""Messages between our Triton models: `EngineRequest` from tokenizer to engine, `Chunk` on to the detokenizer."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from minisgl_backend.arrays import UInt8Array
from minisgl_backend.request import Content, PoolingParams, SamplingParams


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outputs that the client requested."""

    stream: bool = False
    prompt: str | None = None  # precedes the answer (only with stream=False)
    token_ids: bool = False  # token ids instead of text
    prompt_ids: bytes = b""  # precede the answer's: int32, little-endian (only with stream=False)
    apart: bool = False  # without stream: one response per sequence, as with TensorRT-LLM
    finish_reason: bool = False
    stop_reason: bool = False  # the stop string that ended the answer
    llmapi: bool = False  # as TensorRT-LLM's LLM API: metrics by its names, and in a stream all text so far
    cumulative_logprob: bool = False
    logprobs: bool = False
    token_bytes: bool = True  # `bytes` of log-probability tokens that are partial characters; vllm_backend: none
    null_logprobs: bool = False  # `logprobs` is "null": vllm_backend's answer if the request gave no number
    prompt_logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    vector_as_text: bool = False  # an embedding is a JSON list in the text output, as with vllm_backend
    log_probs: bool = False  # tensorrtllm_backend's cum_log_probs and output_log_probs
    perf_metrics: bool = False  # with every response
    final_perf_metrics: bool = False  # with the last one

    @property
    def details(self) -> bool:
        """Whether it includes any output other than text."""
        counts = self.num_input_tokens or self.num_output_tokens or self.perf_metrics or self.final_perf_metrics
        logprobs = self.cumulative_logprob or self.logprobs or self.prompt_logprobs or self.log_probs
        return self.finish_reason or self.stop_reason or counts or logprobs or self.token_ids or self.apart


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A validated request without its prompt tokens."""

    params: SamplingParams
    options: OutputOptions
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    request_id: str = ""
    tenant: str = ""
    contents: tuple[Content, ...] = ()  # of the prompt; the segments of their pixels are the receiver's
    decode_s: float = 0.0  # that their decoding took, and waited
    stable_len: int = 0  # of the prompt, as the next: see Request
    borders: tuple[int, ...] = ()
    # Not (): the answer is vectors. input_ids are then several concatenated prompts of these lengths (int32,
    # little-endian); `poolings` has an entry for each prompt, or one for all.
    poolings: tuple[PoolingParams, ...] = ()
    lengths: bytes = b""
    scoring: str = ""  # not "": scores are computed from the vectors, see text.scoring
    raw_scores: bool = False
    leads: bool = False  # the other prompts share the first one's prefix and wait until it is in the prefix cache
    num_queries: int = 1  # number of queries to score against
    stop: bool = False  # no prompt: running requests with this request_id end with what they have
    answer: str = ""  # reply to such a request: the error CANCELLED with this message; "": none
    command: str = ""  # no prompt: a command (JSON, see delivery.admin_commands) of whoever has this admin key
    key: str = ""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a stream's tokens become text."""

    skip_special_tokens: bool = True
    prompt: str | None = None  # precedes the text
    all_so_far: bool = False  # each response contains the text from the beginning
    prompt_tail: tuple[int, ...] = ()  # the prompt's last tokens, if the text depends on them
    prompt_ids: bytes = b""  # precede the token ids of a chunk that is not turned into text


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The news of one sequence."""

    token_ids: bytes = b""  # int32, little-endian
    text: str | None = None  # text instead of tokens, if the front had to look for stop strings
    is_last: bool = False
    ends_with_stop_token: bool = False  # the last token is not part of the text


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The input for one response of a stream. Chunks of one uid arrive in order, numbered from 1."""

    # Bounds as in the acknowledgements.
    uid: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # of the sequence, or of the first of several
    number: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    confirm: bool = True  # False: a later chunk's acknowledgement covers this one, which saves messages to the front
    parts: tuple[Part, ...] = ()
    options: TextOptions | None = None  # with number 1
    token_ids: bool = False  # the client requested token ids instead of text
    failure: tuple[str, str] | None = None  # status and message: the request ends with this error
    forget: tuple[int, ...] = ()  # uids that end here without a last part


class Codec:
    """Structs <-> UINT8 tensors. Not thread-safe: use one per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._spec = msgspec.msgpack.Decoder(EngineRequest)
        self._chunk = msgspec.msgpack.Decoder(Chunk)

    def pack(self, message: EngineRequest | Chunk) -> UInt8Array:
        """uint8 [n]."""
        return np.frombuffer(self._encoder.encode(message), dtype=np.uint8)

    def spec(self, tensor: UInt8Array) -> EngineRequest:
        """Raises msgspec.MsgspecError if it is not an EngineRequest."""
        return self._spec.decode(tensor.tobytes())

    def chunk(self, tensor: UInt8Array) -> Chunk:
        """Raises msgspec.MsgspecError if it is not a Chunk."""
        return self._chunk.decode(tensor.tobytes())
