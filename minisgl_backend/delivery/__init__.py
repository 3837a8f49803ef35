"""Delivery of streams: from the core's step records to responses in order, with credits, until clients have them.

Runs in the stubs of `engine` and `detokenizer`; senders are given, so no Triton here and never the core.
"""
