"""The client's own gRPC messages are tritonclient's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from client import kserve

ROOT = Path(__file__).resolve().parents[3]


def description(message: Any, fields: set[str] | None = None) -> dict[str, Any]:
    """What is sent of a message type, its fields by name."""
    return {
        field.name: (
            field.number,
            field.type,
            field.containing_oneof.name if field.containing_oneof else None,
            bool(field.message_type and field.message_type.GetOptions().map_entry),
            description(field.message_type) if field.message_type else None,
        )
        for field in message.fields
        if fields is None or field.name in fields
    }


@pytest.mark.parametrize("name", [name for name in kserve._MESSAGES if "." not in name])
def test_a_message_is_as_tritonclient_has_it(name: str) -> None:
    theirs = service_pb2.DESCRIPTOR.message_types_by_name[name]
    assert description(theirs, set(kserve._MESSAGES[name])) == description(kserve._CLASSES[name].DESCRIPTOR)
    left_out = {field.name for field in theirs.fields} - set(kserve._MESSAGES[name])
    assert left_out == ({"outputs"} if name == "ModelInferRequest" else set())


def test_a_request_is_read_by_the_other_side() -> None:
    message = kserve.ModelInferRequest(model_name="m", id="1")
    message.inputs.add(name="x", datatype="INT32", shape=[1, 2]).contents.int_contents.extend([3, 4])
    message.parameters["on"].bool_param = False
    read = service_pb2.ModelInferRequest.FromString(message.SerializeToString())
    assert (read.model_name, read.inputs[0].contents.int_contents[:]) == ("m", [3, 4])
    assert read.parameters["on"].WhichOneof("parameter_choice") == "bool_param"


def test_the_client_needs_neither_numpy_nor_tritonclient() -> None:
    code = "import sys, client.cli, client.grpc_transport, client.http_transport, client.openai_client\n"
    code += "print({'numpy', 'tritonclient', 'torch', 'transformers', 'msgspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"
