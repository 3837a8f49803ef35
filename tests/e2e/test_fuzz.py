"""Strange requests of any kind: all are answered, the wrong ones with INVALID_ARGUMENT and the name of what is wrong.

One server for all of them. No process of it dies, and a stream that runs beside them loses nothing.
"""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.errors import from_message
from minisgl_backend.ipc.wire import Chunk, EngineRequest, OutputOptions, Part, TextOptions
from minisgl_backend.request import Grammar, SamplingParams
from minisgl_backend.serving.tensors import INPUTS, TENSORS, Tensor
from tests.e2e.wire import Server, assert_same_processes, lasting_processes

pytestmark = pytest.mark.e2e

ANSWER_SECONDS = 60.0  # far above what any answer needs: a hang is what it finds
RANDOM_SECONDS, MANY_SECONDS = 8.0, 20.0  # with --full the latter
OK, BAD = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
HARM = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
FORMATS = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?", "UINT8": "<B", "FP16": "<e"}
QUESTION = {"text_input": b"Tell me a story", "max_tokens": 4}


@dataclass(frozen=True)
class Raw:
    """One input exactly as it goes over the wire, right or wrong."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Reply:
    """How a request ended: OK or the error's code and message; the text it brought until then."""

    code: grpc.StatusCode
    message: str
    text: bytes


class RawClient:
    """Sends inputs as they are."""

    def __init__(self, server: Server) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(
        self,
        inputs: Mapping[str, Raw],
        model: str = "ensemble",
        parameters: Mapping[str, str] | None = None,
    ) -> Reply:
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, raw in inputs.items():
            request.inputs.add(name=name, datatype=raw.dtype, shape=raw.shape)
            request.raw_input_contents.append(raw.data)
        for key, value in (parameters or {}).items():
            request.parameters[key].string_param = value
        text = b""
        try:
            for reply in self._stub.ModelStreamInfer(iter((request,)), timeout=ANSWER_SECONDS):
                if reply.error_message:
                    # Statuses travel only with triton_grpc_error, of which tritonserver 2.51 dies (docs/operations.md).
                    status = from_message(reply.error_message).status or "INTERNAL"
                    return Reply(grpc.StatusCode[status], reply.error_message, text)
                for output, data in zip(
                    reply.infer_response.outputs, reply.infer_response.raw_output_contents, strict=True
                ):
                    text += data[4:] if output.name == "text_output" else b""
        except grpc.RpcError as error:
            return Reply(error.code(), error.details() or "", text)
        return Reply(grpc.StatusCode.OK, "", text)

    def close(self) -> None:
        self._channel.close()


def encode(name: str, value: Any) -> Raw:
    """A value (or a list of values) as the tensor that the ensemble declares."""
    dtype = TENSORS[name].dtype
    values = value if isinstance(value, list) else [value]
    if dtype == "STRING":
        texts = [text.encode() if isinstance(text, str) else text for text in values]
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        return Raw("BYTES", (1, len(values)), data)
    return Raw(dtype, (1, len(values)), b"".join(struct.pack(FORMATS[dtype], one) for one in values))


def question(**fields: Any) -> dict[str, Raw]:
    return {name: encode(name, value) for name, value in {**QUESTION, **fields}.items()}


@pytest.fixture
def client(null_server: Server) -> Iterator[RawClient]:
    found = RawClient(null_server)
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def canary(null_server: Server) -> Iterator[None]:
    """A stream that runs all the time must bring what it brings alone."""
    client, stop, faults = RawClient(null_server), threading.Event(), []
    inputs = question(max_tokens=100, stream=True, ignore_eos=True)
    expected = client.ask(inputs)
    assert expected.code is OK
    assert len(expected.text) > 100

    def sing() -> None:
        while not stop.is_set():
            heard = client.ask(inputs)
            if heard != expected:
                faults.append(heard)

    singer = threading.Thread(target=sing)
    singer.start()
    yield
    stop.set()
    singer.join()
    client.close()
    assert not faults


@pytest.fixture(autouse=True)
def no_process_ends(null_server: Server) -> Iterator[None]:
    before = lasting_processes(null_server)
    yield
    assert_same_processes(before, lambda: lasting_processes(null_server))


def wrong_forms(tensor: Tensor) -> Iterator[Raw]:
    """The tensor with another type or shape than declared, or with bytes that do not fit it."""
    other = "INT64" if tensor.dtype != "UINT64" else "FP64"
    right = encode(tensor.name, b"x" if tensor.dtype == "STRING" else 0)
    yield Raw(other, (1, 1), bytes(8))
    yield Raw(right.dtype, (1,), right.data)
    yield Raw(right.dtype, (1, 1, 1, 1), right.data)
    yield Raw(right.dtype, (2, 1), right.data * 2)
    yield Raw(right.dtype, (1, 1), b"")
    yield Raw(right.dtype, (1, 1), right.data[:-1])
    yield Raw(right.dtype, (1, 1), right.data + b"\0")
    yield Raw(right.dtype, (-1, 1), right.data)
    yield Raw(right.dtype, (1, 2**40), right.data)
    if tensor.dims == (1,):
        yield Raw(right.dtype, (1, 2), right.data * 2)
        yield Raw(right.dtype, (1, 0), b"")
    if tensor.dtype == "STRING":
        yield Raw("BYTES", (1, 1), struct.pack("<I", 2**31) + b"x")
        yield Raw("BYTES", (1, 1), b"\xff\xff\xff\xff")


@pytest.mark.parametrize("tensor", INPUTS, ids=lambda tensor: tensor.name)
def test_every_input_in_every_wrong_form(client: RawClient, tensor: Tensor) -> None:
    for raw in wrong_forms(tensor):
        reply = client.ask({**question(), tensor.name: raw})
        assert reply.code is not OK, (raw.dtype, raw.shape, raw.data[:20], reply)
        assert reply.code not in HARM, reply
        assert tensor.name in reply.message or "batch" in reply.message, (raw.shape, reply)


HUGE_TEXT = b"a" * (3 << 20)
NO_TEXT = [b"\xff\xfe", b"\xed\xa0\x80", b"ok \xc3"]
NOT_FINITE = [float("nan"), float("inf"), float("-inf"), 3e38, -1e30]
DEEP = b"[" * 200_000
SCHEMAS = [
    b"{",
    b"[]",
    b'{"type": "no such type"}',
    b'{"$ref": "#"}',
    b'{"$ref": "http://127.0.0.1:1/x"}',
    b'{"$ref": "file:///etc/passwd"}',
    b'{"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}}',
    b'{"not": {}}',
    b'{"type":"array","items":' * 5000,
    b"\xff",
    b"x" * 100_000,
]
WRONG: dict[str, list[Any]] = {
    "text_input": [HUGE_TEXT, "word " * 9000, *NO_TEXT],
    "messages": [DEEP, b"{}", b"[]", b"[null]", b"x", HUGE_TEXT, b'[{"role": "user", "content": 1}]', *NO_TEXT],
    "sampling_parameters": [
        DEEP,
        b"[]",
        b"x",
        b'{"zz": 1}',
        b'{"top_p": [1]}',
        b'{"n": 1e99}',
        b'{"seed": -9223372036854775809}',
        *NO_TEXT,
    ],
    "chat_template_kwargs": [DEEP, b"[]", b"1", b'{"chat_template": "{{ 7 * 7 }}"}', b'{"tokenize": true}', *NO_TEXT],
    "logit_bias": [
        DEEP,
        b"[]",
        b'{"99999999": 1}',
        b'{"-1": 1}',
        b'{"1": 1e400}',
        b'{"1": "nan"}',
        b'{"1": []}',
        *NO_TEXT,
    ],
    "stop_words": [[b"x"] * 65, [b"x"] * 5000, *[[b"x", text] for text in NO_TEXT]],
    "bad_words": [[b"x%d" % n for n in range(1025)], *[[text] for text in NO_TEXT]],
    "stop_token_ids": [[-1], [2**31 - 1], [1024], list(range(300))],
    "guided_decoding_guide_type": [b"", b"poem", b"JSON\0", *NO_TEXT],
    "max_tokens": [0, -1, -(2**31)],
    "min_tokens": [-1, 5, 2**31 - 1],
    "min_length": [-1, 5],
    "temperature": [-0.5, *NOT_FINITE],
    "top_p": [1.01, *NOT_FINITE[:2], 3e38],
    "top_k": [-2, -(2**31)],
    "min_p": [-0.1, 1.1, *NOT_FINITE],
    "repetition_penalty": [0.0, 1e-38, -1.0, *NOT_FINITE],
    "presence_penalty": [2.5, *NOT_FINITE],
    "frequency_penalty": [-2.5, *NOT_FINITE],
    "length_penalty": NOT_FINITE[:3],
    "beam_width": [2, -1, 2**31 - 1],
    "num_return_sequences": [0, -1, 65, 2**31 - 1],
    "end_id": [-2, 5000, 2**31 - 1],
    "num_logprobs": [-1, 21, 2**31 - 1],
    "num_prompt_logprobs": [-1, 21],
    "priority": [-1, 1001],
    "image": [[b"x"]],
    "lora_task_id": [1],
    "return_context_logits": [True],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(client: RawClient, name: str) -> None:
    for value in WRONG[name]:
        fields = {"text_input": b"", name: value} if name == "messages" else {name: value}
        if name == "chat_template_kwargs":
            fields["apply_chat_template"] = True
        reply = client.ask(question(**fields))
        assert reply.code is BAD, (str(value)[:80], reply)
        named = {"min_length": "min_tokens", "num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}
        named |= {
            "sampling_parameters": "top_p",
            "num_return_sequences": "n is",
            "stop_words": "stop",
            "end_id": "stop_token_ids",
        }
        inner = next(iter(json.loads(value))) if value.__class__ is bytes and value.startswith(b'{"') else name
        assert any(word in reply.message for word in (name, named.get(name, name), inner)), (str(value)[:80], reply)
        assert len(reply.message) < 2500, "a wrong value is not sent back whole"


@pytest.mark.parametrize("guide", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf_grammar"])
def test_malicious_grammars(client: RawClient, kind: str, guide: bytes) -> None:
    """Some are no grammar, some are harmless; none may hang, reach for a file or end anything."""
    reply = client.ask(question(guided_decoding_guide_type=kind.encode(), guided_decoding_guide=guide))
    assert reply.code in (grpc.StatusCode.OK, BAD), reply
    if reply.code is BAD:
        assert "guided_decoding_guide" in reply.message, reply


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(" * 5000,
        "[",
        "a{1,1000000000}",
        "((a{1,100}){1,100}){1,100}",
        "(?=a)b",
        "\\",
    ],
)
def test_malicious_expressions(client: RawClient, expression: str) -> None:
    reply = client.ask(question(guided_decoding_guide_type=b"regex", guided_decoding_guide=expression))
    assert reply.code in (grpc.StatusCode.OK, BAD), reply


def random_json(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value, strange ones first."""
    leaves = [None, True, -1, 0, 1e308, 2**70, "", "nan", "\x00", "\ud83d\ude00", "{{ 7 }}", "x" * 1000]
    if depth > 3 or draw.random() < 0.5:
        return draw.choice(leaves)
    if draw.random() < 0.5:
        return [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = ["role", "content", "user", "__class__", "type", "tools", "n", "max_tokens", "stop", "logprobs", "seed", "7"]
    return {draw.choice(keys): random_json(draw, depth + 1) for _ in range(draw.randrange(4))}


def random_input(draw: random.Random, name: str) -> Raw:
    """A tensor of the declared type and shape with any bytes that this type can have."""
    tensor = TENSORS[name]
    count = draw.randrange(4) if tensor.dims == (-1,) else 1
    if tensor.dtype != "STRING":
        size = struct.calcsize(FORMATS[tensor.dtype])
        edge = draw.choice([b"\0", b"\xff", b"\x01", b"\x7f", b"\x80"])
        data = b"".join(draw.choice([edge * size, draw.randbytes(size)]) for _ in range(count))
        return Raw(tensor.dtype, (1, *((count,) if len(tensor.dims) == 1 else (1, count))), data)
    texts: list[str | bytes] = []
    for _ in range(count):
        text = json.dumps(random_json(draw)).encode()
        mangled = bytearray(text)
        for _ in range(draw.choice([0, 0, 0, 1, 3])):
            mangled[draw.randrange(len(mangled))] = draw.randrange(256)
        texts.append(draw.choice([text, bytes(mangled), draw.randbytes(draw.randrange(40))]))
    return encode(name, texts)


def test_random_requests_are_all_answered(client: RawClient, pytestconfig: pytest.Config) -> None:
    """Inputs, request parameters and JSON texts at random. The seed is printed; the same one repeats the requests."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    seconds = MANY_SECONDS if pytestconfig.getoption("--full", default=False) else RANDOM_SECONDS
    draw, deadline, counts = random.Random(seed), time.monotonic() + seconds, {}
    names = [tensor.name for tensor in INPUTS if len(tensor.dims) == 1]
    while time.monotonic() < deadline:
        chosen = draw.sample(names, draw.choice([1, 1, 2, 4]))
        inputs = {**question(), **{name: random_input(draw, name) for name in chosen}}
        if "max_tokens" in chosen:
            inputs["max_tokens"] = encode("max_tokens", draw.choice([-1, 0, 1, 50]))
        keys = ["top_p", "stop", "n", "logit_bias", "guided_decoding", "x", "text_input", "\u00e9"]
        parameters = {draw.choice(keys): json.dumps(random_json(draw)) for _ in range(draw.choice([0, 0, 1]))}
        reply = client.ask(inputs, parameters=parameters)
        counts[reply.code] = counts.get(reply.code, 0) + 1
        allowed = (grpc.StatusCode.OK, BAD, grpc.StatusCode.CANCELLED)  # a random timeout may have passed
        assert reply.code in allowed, (inputs, parameters, reply)
        assert "could not be read" not in reply.message, (inputs, parameters, reply)
    assert counts[BAD] > 10
    assert counts.get(grpc.StatusCode.OK, 0) > 0


# ---- the models behind the ensemble, which a client can reach as well


def packed(message: Any) -> Raw:
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return Raw("UINT8", (1, len(data)), data)


def ids(*values: int) -> Raw:
    return Raw("INT32", (1, len(values)), struct.pack(f"<{len(values)}i", *values))


def spec(**params: Any) -> Raw:
    return packed(EngineRequest(params=SamplingParams(**{"max_tokens": 2, **params}), options=OutputOptions()))


@pytest.mark.parametrize(
    ("input_ids", "request_spec", "named"),
    [
        (ids(1, 1024), spec(), "input_ids"),
        (ids(2**31 - 1), spec(), "input_ids"),
        (ids(1, -1), spec(), "input_ids"),
        (ids(), spec(), "input_ids"),
        (ids(*range(1, 1000), *([5] * 4000)), spec(), "4096"),
        (ids(1), packed(b""), "spec"),
        (ids(1), packed(b"\xff" * 100), "spec"),
        (ids(1), packed({"params": {}, "options": {}, "deadline": "x"}), "spec"),
        (ids(1), packed({"params": {"zz": 1}, "options": {}}), "spec"),
        (ids(1), spec(n=10**9), "n is"),
        (ids(1), spec(temperature=float("nan")), "temperature"),
        (ids(1), spec(stop_token_ids=(9999,)), "stop_token_ids"),
        (ids(1), spec(bad_words_token_ids=((1, 9999),)), "bad_words"),
        (ids(1), spec(logit_bias={70000: 1.0}), "logit_bias"),
        (ids(1), packed({"params": {"seed": 1.5}, "options": {}}), "seed"),
        (ids(1), spec(max_tokens=-4), "max_tokens"),
        (ids(1), spec(grammar=Grammar(kind="json_schema", text="{")), "guided_decoding_guide"),
        (ids(1), packed(EngineRequest(params=SamplingParams(), options=OutputOptions(), priority=-5)), "priority"),
    ],
)
def test_the_engine_checks_what_it_gets(client: RawClient, input_ids: Raw, request_spec: Raw, named: str) -> None:
    reply = client.ask({"input_ids": input_ids, "spec": request_spec}, model="engine")
    assert reply.code is BAD, reply
    assert named in reply.message


def test_the_engine_alone_takes_no_client(client: RawClient) -> None:
    for inputs in ({"input_ids": ids(1)}, {"spec": spec()}):
        reply = client.ask(inputs, model="engine")
        assert reply.code is BAD
        assert "ensemble" in reply.message


@pytest.mark.parametrize(
    "chunk",
    [
        b"",
        b"\xff" * 50,
        Chunk(uid=-(2**63), number=1, parts=(Part(token_ids=b"abc"),), options=TextOptions()),
        Chunk(uid=5, number=1, parts=(Part(token_ids=struct.pack("<i", -7)),), options=TextOptions()),
        Chunk(uid=6, number=1, parts=(Part(token_ids=struct.pack("<i", 10**9)),), options=TextOptions()),
        Chunk(uid=7, number=9, parts=(Part(token_ids=bytes(4)),)),
        Chunk(uid=8, number=1, parts=(Part(), Part())),
        Chunk(uid=2**62, number=1, parts=(Part(is_last=True, ends_with_stop_token=True),), options=TextOptions()),
        Chunk(uid=9, number=1, failure=("NO_SUCH_STATUS", "x")),
    ],
    ids=range(9),
)
def test_the_detokenizer_survives_any_chunk(client: RawClient, chunk: Any) -> None:
    reply = client.ask({"chunk": packed(chunk)}, model="detokenizer")
    assert reply.code is not grpc.StatusCode.DEADLINE_EXCEEDED, reply


def test_the_tokenizer_alone_gives_what_the_engine_takes(client: RawClient) -> None:
    assert client.ask(question(), model="tokenizer").code is grpc.StatusCode.OK
