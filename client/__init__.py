"""A Python client for the model repository, and the command `minisgl`."""

from __future__ import annotations

from client.client import AsyncClient, Client
from client.errors import Cancelled, ClientError, InvalidRequest, ServerError, TimedOut, Unavailable
from client.metrics import Metrics, Sample
from client.request import Message, SamplingOptions
from client.results import Choice, Chunk, Result
from client.stream import AsyncTextStream, TextStream

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ClientError",
    "InvalidRequest",
    "Message",
    "Metrics",
    "Result",
    "Sample",
    "SamplingOptions",
    "ServerError",
    "TextStream",
    "TimedOut",
    "Unavailable",
]
