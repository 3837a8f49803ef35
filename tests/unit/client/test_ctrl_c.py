"""Ctrl-C at any moment of a gRPC stream: KeyboardInterrupt, and a connection that goes on to serve.

gRPC waits in Python, with locks: KeyboardInterrupt in the wrong place there keeps one for ever.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from client import Client

STREAMS = 200


@pytest.mark.timeout(60)
def test_a_connection_outlives_ctrl_c_at_any_moment(grpc_url: str) -> None:
    chance = random.Random(0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def interrupt(delay: float) -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    with Client(grpc_url) as connected:
        for _ in range(STREAMS):
            with connected.stream("forever") as stream:
                next(stream)
                thread = threading.Thread(target=interrupt, args=(chance.uniform(0.005, 0.02),))
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    stream.result()
            thread.join()
        assert connected.generate("a").text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
