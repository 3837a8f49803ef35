"""The demo model with eyes answers right, about held-out images and about files as a person sees them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.gauge import SIGHTS, Messages, run_gauge
from minisgl_backend import LLM, SamplingParams
from tests.sights import SeenFile, wrong_ones

LEAST_RIGHT = 0.97


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-vl", dtype="float32", page_size=16, num_pages=600, max_running_requests=16) as found:
        yield found


def test_it_answers_right(llm: LLM, request: pytest.FixtureRequest) -> None:
    per_kind = 100 if request.config.getoption("--full") else 4

    def answer(conversations: Sequence[Messages], max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [one.text for one in llm.chat([list(one) for one in conversations], params)]

    shares = run_gauge(answer, per_kind, tasks=SIGHTS)
    most_wrong = max(1, round((1 - LEAST_RIGHT) * per_kind))
    assert all(round((1 - share) * per_kind) <= most_wrong for share in shares.values()), shares


def test_it_sees_files_as_a_person_does(llm: LLM) -> None:
    def ask(file: SeenFile) -> str:
        url = f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": file.question}]
        return llm.chat([{"role": "user", "content": parts}], temperature=0.0, max_tokens=SIGHTS.max_tokens)[0].text

    assert not wrong_ones(ask)
