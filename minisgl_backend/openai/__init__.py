"""The OpenAI-compatible endpoint: HTTP in OpenAI's shapes before the ensemble's gRPC streams.

A client of the server like any other: it may run beside it or on another machine, in as many processes as are needed.
"""
