"""What vllm_backend's own tests import from its `ci/common`, written anew, and where they find the server.

The tests name `localhost:8001`; a test run has ports of its own. As a pytest plugin this module leads them there, and
takes every so many of them, since some of the files hold over a thousand.
"""

from __future__ import annotations

import json
import os
import queue
import unittest
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

PORT = os.environ["VLLM_CI_GRPC_PORT"]
EVERY = int(os.environ.get("VLLM_CI_EVERY", "1"))


def _lead(client: type) -> None:
    original = client.__init__

    def __init__(self: Any, url: str = "localhost:8001", *arguments: Any, **options: Any) -> None:
        original(self, f"127.0.0.1:{PORT}" if url == "localhost:8001" else url, *arguments, **options)

    client.__init__ = __init__  # type: ignore[misc]


_lead(tritonclient.grpc.InferenceServerClient)
_lead(tritonclient.grpc.aio.InferenceServerClient)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = items[::EVERY]


class TestResultCollector(unittest.TestCase):
    """The original writes a report file as well."""


class AsyncTestResultCollector(unittest.IsolatedAsyncioTestCase):
    """The original writes a report file as well."""


class UserData:
    def __init__(self) -> None:
        self._completed_requests: queue.Queue[Any] = queue.Queue()


def callback(user_data: UserData, result: Any, error: Any) -> None:
    user_data._completed_requests.put(result if error is None else error)


def create_vllm_request(
    prompt: str,
    request_id: int | str,
    stream: bool,
    sampling_parameters: dict[str, Any],
    model_name: str,
    send_parameters_as_tensor: bool = True,
    exclude_input_in_output: bool | None = None,
) -> dict[str, Any]:
    """The arguments of one `stream_infer` request."""
    tensors: dict[str, tuple[str, Any]] = {"text_input": ("BYTES", prompt.encode()), "stream": ("BOOL", stream)}
    if send_parameters_as_tensor:
        tensors["sampling_parameters"] = ("BYTES", json.dumps(sampling_parameters).encode())
    if exclude_input_in_output is not None:
        tensors["exclude_input_in_output"] = ("BOOL", exclude_input_in_output)
    inputs = []
    for name, (datatype, value) in tensors.items():
        tensor = tritonclient.grpc.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(np.array([value], dtype=object if datatype == "BYTES" else bool))
        inputs.append(tensor)
    return {
        "model_name": model_name,
        "inputs": inputs,
        "outputs": [tritonclient.grpc.InferRequestedOutput("text_output")],
        "request_id": str(request_id),
        "parameters": sampling_parameters,
    }
