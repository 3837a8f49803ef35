"""The OpenAI-compatible endpoint: HTTP in OpenAI's format in front of the ensemble's gRPC streams.

A client of the server like any other: it runs on the same machine or another one, in any number of processes.
"""
