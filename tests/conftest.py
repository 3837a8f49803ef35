"""What must be set before anything is imported, whatever part of the tests runs."""

from __future__ import annotations

import os
import shutil
import signal

# Triton decides once, when it is first imported (xgrammar and transformers may do that), whether kernels are compiled
# or interpreted. Without a GPU only its interpreter can run them.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, and children inherit that: Ctrl-C tests would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Other people's tests, which tests/e2e/test_third_party_clients.py runs against a server.
collect_ignore = ["third_party", "e2e/vllm_ci"]
