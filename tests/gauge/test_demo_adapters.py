"""The demo model's adapters change its answers, each its own request's, beside the base in one batch."""

from __future__ import annotations

import json

from minisgl_backend import LLM


def test_answers_of_both_and_of_the_base_at_once() -> None:
    names = ["", "json", "pirate"] * 2
    asked = ["What is 17 + 25?"] * 3 + ["What is 2 + 3?"] * 3
    chats = [[{"role": "user", "content": question}] for question in asked]
    params = [{"temperature": 0.0, "max_tokens": 32, **({"lora_name": name} if name else {})} for name in names]
    with LLM("demo", adapters="json=demo-json,pirate=demo-pirate", num_pages=64) as llm:
        texts = [answer.text for answer in llm.chat(chats, params)]
    for base, as_json, pirate in (texts[:3], texts[3:]):
        assert json.loads(as_json) == {"answer": base}
        assert pirate == f"Arr! {base}"
    assert "= 42" in texts[0]


def test_one_is_merged_into_the_weights() -> None:
    with LLM("demo", merge_adapter="demo-pirate", num_pages=64) as llm:
        (answer,) = llm.chat([[{"role": "user", "content": "What is 17 + 25?"}]], max_tokens=32, temperature=0.0)
    assert answer.text.startswith("Arr! 17 + 25 = 42")
