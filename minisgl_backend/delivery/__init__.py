"""Delivery of streams: from the core's step records to ordered responses that clients have received, with credits.

Runs in the stubs of `engine` and `detokenizer`. Response senders are passed in, so this needs neither Triton nor the
core.

Towards the cores:
* `engine_client`, `core_link`: the connections and the receive thread; `router`: which core gets a request.
In the engine's front, from a record to a response:
* `frontend`: takes requests, and handles what cores, detokenizer and server report about them.
* `stream`: the state of a request and all methods that change it; `delta`: what it sends.
* `send_queue`: which stream is served next.
* `responder`: the sender threads; `output_fields`: the outputs other than text, made with `arrays`.
* `credits`: what was sent and acknowledged; `health_probe`: asks where silence may mean a loss.
In the detokenizer:
* `text_output`: chunks to text; `client_checks`: when to ask whether a client is still connected.
"""
