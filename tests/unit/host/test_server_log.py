"""The readable form of tritonserver's log."""

from __future__ import annotations

import pytest

from minisgl_backend.host.server_log import LogFilter, readable_line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "I1121 02:38:50.067815 3671 model_lifecycle.cc:839] \"successfully loaded 'b'\"",
            None,
        ),
        ('I1121 02:38:50.077418 3671 metrics.cc:770] "Collecting CPU metrics"', None),
        ('E1121 02:41:37.541888 3671 pb_stub.cc:714] "Failed: \\"x\\"\\nAt: y"', 'error: Failed: "x"\nAt: y'),
        ('W1121 02:38:50.077295 3671 metrics.cc:798] "DCGM unable to start: DCGM initialization error"', None),
        ("W1121 02:38:50.077295 3671 metrics.cc:798] plain text", "warning: plain text"),
        ("| Model | Version | Status |", None),
        ("+-------+---------+--------+", None),
        ("", None),
        ("what a model prints", "what a model prints"),
    ],
)
def test_readable_line(line: str, shown: str | None) -> None:
    assert readable_line(line) == shown


def test_lines_cut_anywhere_come_out_whole() -> None:
    data = b'W1121 02:38:50.067815 1 a.cc:8] "slow"\n| Model | Status |\nhello\n'
    for cut in range(len(data)):
        log = LogFilter()
        assert log.feed(data[:cut]) + log.feed(data[cut:]) + log.close() == b"warning: slow\nhello\n"


def test_a_progress_bar_is_shown_before_its_line_ends() -> None:
    log = LogFilter()
    assert log.feed(b"loading weights 10%\r") == b"loading weights 10%\r"
    assert log.feed(b"loading weights 20%\r") == b"loading weights 20%\r"


def test_verbose_shows_all_and_still_reads_what_is_live() -> None:
    log = LogFilter(verbose=True)
    line = b'I1121 02:44:32.689985 1 server.cc:345] "Timeout 9: Found 2 live models and 0 in-flight x"\n'
    assert log.feed(line) == line
    assert log.live_models == 2


def test_why_a_model_cannot_load_is_left_to_who_started_the_server() -> None:
    message = "tp is 3; allowed: a divisor of the model's num_attention_heads, which is 8"
    told = f"TritonModelException: {message}\\n\\nAt:\\n  engine_model.py(51): initialize\\n"
    lines = [
        f'E1121 05:16:32.188878 1 backend_model.cc:692] "ERROR: Failed to create instance: {told}"\n',
        f"E1121 05:16:32.188982 1 model_lifecycle.cc:642] \"failed to load 'engine' version 1: Internal: {told}\"\n",
        f"E1121 05:16:32.454189 1 model_repository_manager.cc:703] \"'ensemble' depends on 'engine': {told};\"\n",
        "error: creating server: Internal - failed to load all models\n",
    ]
    log = LogFilter()
    assert log.feed("".join(lines).encode()) == b""
    assert log.refusal == message
    verbose = LogFilter(verbose=True)
    assert verbose.feed("".join(lines).encode()) == "".join(lines).encode()
    assert verbose.refusal == message
