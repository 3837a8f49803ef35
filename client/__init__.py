"""A Python client for the model repository, and the command `minisgl`."""

from __future__ import annotations

from .client import AsyncClient, Client
from .errors import Cancelled, ClientError, InvalidRequest, ServerError, TimedOut, Unavailable
from .metrics import Metrics, Sample
from .request import Message, SamplingOptions
from .results import Choice, Chunk, Result
from .stream import AsyncTextStream, TextStream
from .vectors import Embeddings

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ClientError",
    "Embeddings",
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
