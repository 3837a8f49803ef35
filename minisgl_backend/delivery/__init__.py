"""Delivery of streams: from the core's step records to responses in order, with credits, until clients have them.

Runs in the stubs of `engine` and `detokenizer`; senders are given, so no Triton here and never the core.

Towards the cores:
* `engine_client`, `core_link`: the connections, and the thread that receives; `router`: which core gets a request.
In the engine's front, from a record to a response:
* `frontend`: requests in, and what the cores, the detokenizer and the server say of them.
* `stream`: what is known of a request, and the only ways to change it; `send_queue`: whose turn it is.
* `responder`: the threads that send; `output_fields`: the outputs beside the text, of `arrays`.
* `credits`: what was sent and acknowledged; `prober`: asks where silence could mean a loss.
In the detokenizer:
* `text_output`: chunks into text; `client_checks`: when to ask whether a client is still there.
"""
