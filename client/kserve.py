"""The gRPC messages and methods that the client uses: KServe's inference protocol, version 2, with Triton's streams.

They are defined in https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto and built
here at import, in a descriptor pool of their own, so that a client needs only grpcio and protobuf: tritonclient needs
NumPy and others, more than all the rest together.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"
_SERVICE = "inference.GRPCInferenceService"

# Message: field -> (number, type); a dot: nested; `repeated`, `oneof` and `map` (from strings) as in a .proto file.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "InferParameter": {
        "bool_param": (1, "oneof bool"),
        "int64_param": (2, "oneof int64"),
        "string_param": (3, "oneof string"),
        "double_param": (4, "oneof double"),
        "uint64_param": (5, "oneof uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "inputs": (5, "repeated ModelInferRequest.InferInputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "outputs": (5, "repeated ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "ModelInferResponse")},
}
_FIELD = descriptor_pb2.FieldDescriptorProto


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="minisgl/grpc_service.proto", package=_PACKAGE, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name, fields in _MESSAGES.items():
        outer, _, own = name.rpartition(".")
        message = made[name] = made[outer].nested_type.add() if outer else file.message_type.add()
        message.name = own
        for field_name, (number, kind) in fields.items():
            _add_field(message, f"{_PACKAGE}.{name}", field_name, number, kind)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, owner: str, name: str, number: int, kind: str) -> None:
    label, _, kind = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = _FIELD.LABEL_REPEATED
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if label == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, owner, "key", 1, "string")
        _add_field(entry, owner, "value", 2, kind)
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{owner}.{entry.name}"
    elif kind[0].isupper():
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    names = [name for name in _MESSAGES if "." not in name]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{n}")) for n in names}


_CLASSES = _classes()
ServerLiveRequest: Any = _CLASSES["ServerLiveRequest"]
ServerReadyRequest: Any = _CLASSES["ServerReadyRequest"]
ModelReadyRequest: Any = _CLASSES["ModelReadyRequest"]
ModelInferRequest: Any = _CLASSES["ModelInferRequest"]
ModelInferResponse: Any = _CLASSES["ModelInferResponse"]
ModelStreamInferResponse: Any = _CLASSES["ModelStreamInferResponse"]


class Stub:
    """The methods, on a channel of `grpc` or of `grpc.aio`."""

    def __init__(self, channel: Any) -> None:
        self.ServerLive = _unary(channel, "ServerLive")
        self.ServerReady = _unary(channel, "ServerReady")
        self.ModelReady = _unary(channel, "ModelReady")
        self.ModelStreamInfer = channel.stream_stream(
            f"/{_SERVICE}/ModelStreamInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelStreamInferResponse.FromString,
        )


def _unary(channel: Any, name: str) -> Any:
    return channel.unary_unary(
        f"/{_SERVICE}/{name}",
        request_serializer=_CLASSES[f"{name}Request"].SerializeToString,
        response_deserializer=_CLASSES[f"{name}Response"].FromString,
    )
