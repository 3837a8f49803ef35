"""A stand-in for Triton's two front ends: real sockets and protobufs, scripted answers."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minisgl_backend.remote_errors import NO_CHAT_TEMPLATE

WORDS = ["Zwölf ", "鱼 und ", "🦜", "👩‍👩‍👧 ", "Ende."]
PREFIX = "in ensemble 'ensemble', "
METRICS = """# HELP nv_inference_request_success Number of successful requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 7
nv_inference_request_success{model="engine",version="1"} 3
minisgl_pages_leased{model="engine"} 1.5e1
minisgl_info{model="smollm2",version="0.1.0",max_model_len="8192"} 1
minisgl_start_time_seconds 1.7e9
minisgl_engine_up 1
minisgl_requests_running 2
minisgl_requests_waiting 1
minisgl_requests_finished_total 7
minisgl_requests_cancelled_total 3
minisgl_generated_tokens_total 1224
minisgl_prompt_tokens_total 400
minisgl_cached_tokens_total 300
minisgl_time_to_first_token_seconds_sum 2
minisgl_time_to_first_token_seconds_count 4
minisgl_inter_token_seconds_sum 50
minisgl_inter_token_seconds_count 200
minisgl_kv_pages{state="total"} 2911
minisgl_kv_pages{state="leased"} 5
minisgl_kv_pages{state="cached"} 19
odd{text="a \\"b\\", c\\\\d"} NaN
"""


class Record:
    """What the server saw."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.cancelled = threading.Event()


def answers(request: dict[str, Any], record: Record) -> Iterator[dict[str, Any]]:
    """The responses to one request; {"error": (status, message)} ends them with an error."""
    prompt = request.get("text_input", [""])[0]
    if "messages" in request:
        prompt = json.loads(request["messages"][0])[-1]["content"]
    if prompt == "base model" and "messages" in request:
        yield {"error": ("INVALID_ARGUMENT", PREFIX + f"messages: {NO_CHAT_TEMPLATE} and goes on with a text")}
    elif prompt == "nothing":
        yield {"text_output": [""], "finish_reason": ["stop"], "num_input_tokens": [4], "num_output_tokens": [0]}
    elif prompt == "invalid":
        yield {"error": ("INVALID_ARGUMENT", PREFIX + "top_p is 7; allowed: above 0 and at most 1")}
    elif prompt == "busy":
        yield {"error": ("UNAVAILABLE", "the queue is full")}
    elif prompt == "cancelled":
        yield {"error": ("CANCELLED", "request was cancelled")}
    elif prompt == "break":
        yield {"text_output": ["half "]}
        yield {"error": ("INTERNAL", PREFIX + "the step failed")}
    elif prompt == "silence":
        time.sleep(3)
    elif prompt == "forever":
        for number in range(100_000):
            yield {"text_output": [f"{number} "], "num_output_tokens": [1]}
            time.sleep(0.005)
    elif prompt == "no final":
        yield {"text_output": ["cut "], "num_output_tokens": [1]}
    elif not request["stream"][0]:
        count = request.get("num_return_sequences", [1])[0]
        yield {
            "text_output": ["".join(WORDS)] * count,
            "finish_reason": ["stop"] * count,
            "num_input_tokens": [4],
            "num_output_tokens": [len(WORDS)] * count,
        }
    else:
        yield from _streamed(request)


def _streamed(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count = request.get("num_return_sequences", [1])[0]
    for position, word in enumerate(WORDS):
        for index in range(count):
            answer: dict[str, Any] = {"text_output": [word], "num_input_tokens": [4], "num_output_tokens": [1]}
            if count > 1:
                answer["sequence_index"] = [index]
            if "num_logprobs" in request:
                answer["logprobs"] = [json.dumps([{str(position): {"logprob": -0.5}}])]
            if position == len(WORDS) - 1:
                answer["finish_reason"] = ["length" if index else "stop"]
            yield answer


class GrpcServicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers over gRPC. Like Triton, sends errors inside the stream unless the metadata ask for a status."""

    def __init__(self, record: Record, in_band_errors: bool) -> None:
        self._record = record
        self._in_band_errors = in_band_errors

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        complete = threading.Event()
        context.add_callback(lambda: None if complete.is_set() else self._record.cancelled.set())
        for message in request_iterator:
            request = _decode(message)
            self._record.requests.append(request)
            for answer, last in _mark_last(answers(request, self._record)):
                if "error" in answer:
                    complete.set()
                    status, text = answer["error"]
                    if not self._in_band_errors:
                        context.abort(getattr(grpc.StatusCode, status), text)
                    yield service_pb2.ModelStreamInferResponse(error_message=text)
                    return
                alone = request.get("text_input") == ["lone final"]
                if last and not alone:
                    complete.set()
                yield _encode(answer, message.id, final=last and not alone)
                if last and alone:
                    complete.set()
                    yield _encode({}, message.id, final=True)
            if request.get("text_input") == ["no final"]:
                complete.set()


def _mark_last(items: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each item as soon as it comes, with whether its sequence ends there."""
    for item in items:
        reasons = item.get("finish_reason", [None])
        yield item, reasons != [None] and item.get("sequence_index", reasons) in (reasons, [1])


class HttpHandler(BaseHTTPRequestHandler):
    """Answers over HTTP, with server-sent events for generate_stream."""

    protocol_version = "HTTP/1.1"
    record: Record

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, METRICS.encode())
        else:
            self._send(404 if "/models/other" in self.path else 200, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request: dict[str, Any] = {name: value if isinstance(value, list) else [value] for name, value in body.items()}
        request["path"] = self.path
        self.record.requests.append(request)
        if "/models/other/" in self.path:
            self._send(404, json.dumps({"error": "Request for unknown model: 'other' is not found"}).encode())
        elif self.path.endswith("/generate"):
            self._whole(request)
        else:
            self._events(request)

    def _whole(self, request: dict[str, Any]) -> None:
        answer = next(answers(request, self.record), {"error": ("INTERNAL", "no answer")})
        if "error" in answer:
            status, text = answer["error"]
            self._send(_HTTP_STATUS[status], json.dumps({"error": text}).encode())
        else:
            self._send(200, json.dumps({"model_name": "ensemble", **_flat(answer)}).encode())

    def _events(self, request: dict[str, Any]) -> None:
        started = False
        try:
            for answer in answers(request, self.record):
                status, body = 200, {"model_name": "ensemble", **_flat(answer)}
                if "error" in answer:
                    status, body = _HTTP_STATUS[answer["error"][0]], {"error": answer["error"][1]}
                if not started:
                    self.send_response(status)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                started = True
                data = f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()
                for piece in (data[:9], data[9:]):  # an event, and a character, may be split anywhere
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.record.cancelled.set()
            self.close_connection = True

    def _send(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.record.cancelled.set()

    def log_message(self, *arguments: object) -> None:
        pass


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


_HTTP_STATUS = {"INVALID_ARGUMENT": 400, "CANCELLED": 400, "INTERNAL": 500, "UNAVAILABLE": 503}


def start_grpc(record: Record, in_band_errors: bool = False) -> tuple[Any, str]:
    """A server on a free port and its address; `server.stop(None)` ends it."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcServicer(record, in_band_errors), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def start_http(record: Record) -> tuple[ThreadingHTTPServer, str]:
    """A server on a free port and its address; `server.shutdown()` and `server_close()` end it."""
    handler = type("Handler", (HttpHandler,), {"record": record})
    server = _HttpServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server, f"127.0.0.1:{server.server_address[1]}"


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: values[0] if len(values) == 1 else values for name, values in answer.items()}


_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
}


def _decode(message: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"id": message.id, "model": message.model_name}
    for tensor in message.inputs:
        values = list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
        assert list(tensor.shape) == [1, len(values)]
        request[tensor.name] = [value.decode() for value in values] if tensor.datatype == "BYTES" else values
    if "timeout" in message.parameters:
        request["timeout"] = [message.parameters["timeout"].int64_param]
    return request


def _encode(answer: dict[str, Any], request_id: str, final: bool) -> Any:
    response = service_pb2.ModelInferResponse(model_name="ensemble", id=request_id)
    response.parameters["triton_final_response"].bool_param = final
    for name, values in answer.items():
        text = isinstance(values[0], str)
        response.outputs.add(name=name, datatype="BYTES" if text else "INT32", shape=[1, len(values)])
        if text:
            raw = b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
        else:
            raw = struct.pack(f"<{len(values)}i", *values)
        response.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=response)
