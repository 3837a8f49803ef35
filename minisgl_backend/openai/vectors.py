"""The outputs of the server's model `embedding`: vectors, scores, and counts."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from minisgl_backend.openai.triton import RequestContext, ServerCall, TritonServer

_MODEL = "embedding"


@dataclass(frozen=True)
class Vectors:
    """One answer. Numbers are float32, little-endian, as received."""

    rows: Sequence[bytes]  # one vector per prompt; [] if scores were requested
    scores: Sequence[float]  # one per document
    prompt_lengths: Sequence[int]  # tokens of each prompt
    num_cached_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts."""
        tokens = sum(self.prompt_lengths)
        details = {"cached_tokens": self.num_cached_tokens}
        return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}


def numbers(row: bytes) -> list[float]:
    """A vector as Python numbers."""
    return array("f", row).tolist()


class VectorCall(ServerCall):
    """A request for vectors."""

    def __init__(
        self, triton: TritonServer, fields: Mapping[str, Any], context: RequestContext, names: Mapping[str, str]
    ) -> None:
        """`fields`: a pooling_request of serving.pooling_codec; `names`: the client's names of them."""
        if context.tenant:
            fields = {**fields, "tenant": context.tenant}
        message = service_pb2.ModelInferRequest(model_name=_MODEL, id=context.request_id)
        tensor = message.inputs.add(name="pooling_request", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(json.dumps(fields, ensure_ascii=False).encode())
        super().__init__(triton.infer(message, context), names)

    async def result(self) -> Vectors:
        """Raises ApiError, ClientLeft."""
        return _vectors(service_pb2.ModelInferResponse.FromString(await self._answer(self._call)))


def _vectors(response: Any) -> Vectors:
    rows: list[bytes] = []
    found: dict[str, Sequence[Any]] = {}
    for output, value in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "embedding":
            width = 4 * output.shape[-1]
            rows = [value[start : start + width] for start in range(0, len(value), width)]
        else:
            kind = "f" if output.datatype == "FP32" else "i"
            found[output.name] = struct.unpack(f"<{len(value) // 4}{kind}", value)
    return Vectors(
        rows=rows,
        scores=found.get("score", ()),
        prompt_lengths=found["prompt_lengths"],
        num_cached_tokens=sum(found["num_cached_tokens"]),
    )
