"""What travels between our Triton models: `EngineRequest` from tokenizer to engine, `Chunk` on to the detokenizer."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from minisgl_backend.arrays import UInt8Array
from minisgl_backend.request import PoolingParams, SamplingParams


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client wants to read of its answer."""

    stream: bool = False
    prompt: str | None = None  # goes before the answer (only with stream=False)
    token_ids: bool = False  # token ids instead of text
    prompt_ids: bytes = b""  # go before the answer's: int32, little-endian (only with stream=False)
    apart: bool = False  # without stream: each sequence is a response of its own, as with TensorRT-LLM
    finish_reason: bool = False
    stop_reason: bool = False  # the stop string that ended the answer
    llmapi: bool = False  # as TensorRT-LLM's LLM API: figures by its names, too, and in a stream all text so far
    cumulative_logprob: bool = False
    logprobs: bool = False
    token_bytes: bool = True  # beside a token of log-probabilities that is not whole characters: vllm_backend has none
    null_logprobs: bool = False  # `logprobs` is "null": vllm_backend's answer where nothing said how many
    prompt_logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    vector_as_text: bool = False  # an embedding is a JSON list in the text, as with vllm_backend
    log_probs: bool = False  # tensorrtllm_backend's cum_log_probs and output_log_probs
    perf_metrics: bool = False  # with every response
    final_perf_metrics: bool = False  # with the last one

    @property
    def details(self) -> bool:
        """Whether it wants to read anything beside the text."""
        counts = self.num_input_tokens or self.num_output_tokens or self.perf_metrics or self.final_perf_metrics
        logprobs = self.cumulative_logprob or self.logprobs or self.prompt_logprobs or self.log_probs
        return self.finish_reason or self.stop_reason or counts or logprobs or self.token_ids or self.apart


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checked request, all but its prompt tokens."""

    params: SamplingParams
    options: OutputOptions
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    request_id: str = ""
    tenant: str = ""
    # Not (): the answer is vectors. input_ids are several prompts then, one behind the other, of these lengths (int32,
    # little-endian), and each of them becomes what its entry says, or the only one.
    poolings: tuple[PoolingParams, ...] = ()
    lengths: bytes = b""
    scoring: str = ""  # not "": scores are made of the vectors, see text.scoring
    leads: bool = False  # the others begin as the first prompt does, and wait until it is in the prefix cache
    num_queries: int = 1  # and of as many queries
    stop: bool = False  # no prompt: what runs under this request_id ends with what it has
    answer: str = ""  # to such a request: the error CANCELLED with this message; "": nothing


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a stream become text."""

    skip_special_tokens: bool = True
    prompt: str | None = None  # goes before the text
    all_so_far: bool = False  # each response has the text from the beginning
    prompt_tail: tuple[int, ...] = ()  # the last tokens of the prompt, where the text depends on them
    prompt_ids: bytes = b""  # go before the token ids of a chunk that becomes no text


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of one sequence."""

    token_ids: bytes = b""  # int32, little-endian
    text: str | None = None  # the text instead of the tokens, where the front had to look for stop strings
    is_last: bool = False
    ends_with_stop_token: bool = False  # the last token is no text


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one response of a stream needs to become text. Chunks of one uid arrive in order, numbered from 1."""

    # Bounds as of what confirms them.
    uid: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # of the sequence, the first one where there are several
    number: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    confirm: bool = True  # False: with a later one, so that few chunks cost a message to the front
    parts: tuple[Part, ...] = ()
    options: TextOptions | None = None  # with number 1
    token_ids: bool = False  # the client wants the ids, not the text
    failure: tuple[str, str] | None = None  # status and message: the request ends with this error
    forget: tuple[int, ...] = ()  # uids that end here without a last part


class Codec:
    """Structs <-> UINT8 tensors. Not thread-safe: one for each thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._spec = msgspec.msgpack.Decoder(EngineRequest)
        self._chunk = msgspec.msgpack.Decoder(Chunk)

    def pack(self, message: EngineRequest | Chunk) -> UInt8Array:
        """uint8 [n]."""
        return np.frombuffer(self._encoder.encode(message), dtype=np.uint8)

    def spec(self, tensor: UInt8Array) -> EngineRequest:
        """Raises msgspec.MsgspecError where it is none."""
        return self._spec.decode(tensor.tobytes())

    def chunk(self, tensor: UInt8Array) -> Chunk:
        """Raises msgspec.MsgspecError where it is none."""
        return self._chunk.decode(tensor.tobytes())
