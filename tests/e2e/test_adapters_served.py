"""`minisgl serve --adapters`: a client of OpenAI's API names one as its model, one of Triton's by `lora_name`."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as triton

from tests.adapter_folders import merge, save_for
from tests.e2e.test_families_served import COUNT, PROMPT, save_words, served, text_of
from tests.parity.checkpoints import reference_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@torch.inference_mode()
def greedy(model: Any) -> str:
    tokens = list(PROMPT)
    for _ in range(COUNT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return text_of(tokens[len(PROMPT) :])


def by_triton(port: int, **more: Any) -> str:
    sampling = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, **more}
    values = {"text_input": text_of(PROMPT), "sampling_parameters": json.dumps(sampling)}
    inputs = []
    for name, text in values.items():
        inputs.append(triton.InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([text.encode()], dtype=object))
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("vllm_model", inputs)
        found = answers.get(timeout=60)
        client.stop_stream()
    if isinstance(found, Exception):
        raise found
    return str(found.as_numpy("text_output")[0].decode())


def test_each_door_answers_by_the_adapter_that_it_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint("qwen3-tied-sharded", base)
    save_words(base)
    adapter = save_for(tmp_path / "sql", reference_model(base), "_proj$")
    merged = reference_model(base)
    merge(merged, adapter)
    expected = {"base": greedy(reference_model(base)), "sql": greedy(merged)}
    assert expected["base"] != expected["sql"]
    with served(base, tmp_path / "log", "--adapters", f"sql={adapter}", "--served-model-name", "base") as (grpc, api):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{api}/v1", api_key="none")
        cards = {card.id: card.model_dump() for card in client.models.list()}
        assert {name: card["parent"] for name, card in cards.items()} == {"base": None, "sql": "base"}
        assert cards["sql"]["root"] == str(adapter)
        for model in ("base", "sql", "base:sql"):
            answer = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=COUNT, temperature=0.0, extra_body={"ignore_eos": True}
            )
            assert (answer.model, answer.choices[0].text.strip()) == (model, expected[model.rpartition(":")[2]])
            chat = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text_of(PROMPT)}],
                max_tokens=COUNT,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )
            assert (chat.choices[0].message.content or "").strip() == expected[model.rpartition(":")[2]]
        with pytest.raises(openai.NotFoundError, match="which is not served here; allowed: base, sql"):
            client.completions.create(model="other", prompt="w1")
        vectors = [client.embeddings.create(model=model, input=[PROMPT]).data[0].embedding for model in ("base", "sql")]
        assert vectors[0] != vectors[1]
        assert by_triton(grpc).strip() == expected["base"]
        assert by_triton(grpc, lora_name="sql").strip() == expected["sql"]
        with pytest.raises(Exception, match="lora_name is 'other', which is not served; allowed: sql"):
            by_triton(grpc, lora_name="other")
