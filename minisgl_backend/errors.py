"""The errors this project raises, and who is to blame for each.

    MinisglError
├── ConfigError            a wrong option, model or machine; raised at start; names the key and the remedy
├── InvalidRequestError    the client's fault; one request fails       -> INVALID_ARGUMENT
├── CapacityError          a queue is full; one request fails          -> UNAVAILABLE
├── RequestCancelled       the client left, or its deadline passed     -> CANCELLED
└── EngineDeadError        the core or a follower died; all fail       -> UNAVAILABLE
"""

from __future__ import annotations


class MinisglError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(MinisglError):
    """An option, a model folder or the machine cannot be served. Raised before anything is loaded."""


class InvalidRequestError(MinisglError):
    """A request holds a value that is not allowed. The message names the field, the value and what is allowed."""


class CapacityError(MinisglError):
    """The request cannot be taken now; the same request may succeed later."""


class RequestCancelled(MinisglError):
    """The client went away or the request's deadline passed before the answer was complete."""


class EngineDeadError(MinisglError):
    """The engine process that held this request died."""


_STATUS = (
    (InvalidRequestError, "INVALID_ARG"),
    (CapacityError, "UNAVAILABLE"),
    (EngineDeadError, "UNAVAILABLE"),
    (RequestCancelled, "CANCELLED"),
)


def status_of(error: Exception) -> str:
    """The name of the Triton error code that an error is answered with: an attribute of pb_utils.TritonError."""
    return next((name for kind, name in _STATUS if isinstance(error, kind)), "INTERNAL")
